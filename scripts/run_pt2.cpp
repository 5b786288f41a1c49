// Runs a file of `python -m app.export_pt2` without Python. Reads images, float32 [N, 1, 28, 28],
// from standard input; prints a line of logits for each. To compile and run, with $torch as the
// folder of the package torch:
//
//   g++ -std=c++20 -O2 scripts/run_pt2.cpp -o run_pt2 -I$torch/include -L$torch/lib
//       -Wl,-rpath,$torch/lib -Wl,--no-as-needed -ltorch -ltorch_cpu -lc10
//   ./run_pt2 ops/_C.abi3.so model.pt2 < images
#include <ATen/ops/from_blob.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <iostream>
#include <iterator>
#include <string>

int main(int argc, char** argv) {
  if (argc != 3 || !dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL)) {  // registers the operators
    std::cerr << (argc == 3 ? dlerror() : "usage: run_pt2 LIBRARY MODEL < IMAGES") << '\n';
    return 2;
  }
  torch::inductor::AOTIModelPackageLoader network(argv[2]);
  std::string pixels(std::istreambuf_iterator<char>(std::cin), {});
  const int64_t images = pixels.size() / (28 * 28 * sizeof(float));
  const at::Tensor input = at::from_blob(pixels.data(), {images, 1, 28, 28}, at::kFloat);
  const at::Tensor logits = network.run(std::vector<at::Tensor>{input})[0].contiguous();
  for (int64_t i = 0; i < logits.numel(); ++i) {
    std::cout << logits.const_data_ptr<float>()[i] << ((i + 1) % logits.size(1) ? ' ' : '\n');
  }
}
