// Runs a file of `python -m app.export_pt2` without Python. Reads images [N, 1, 28, 28] from
// standard input, float32, or uint8 for a file with preprocess=true; prints a line of logits for
// each. To compile and run, with $torch as the folder of the package torch:
//
//   g++ -std=c++20 -O2 scripts/run_pt2.cpp -o run_pt2 -I$torch/include -L$torch/lib
//       -Wl,-rpath,$torch/lib -Wl,--no-as-needed -ltorch -ltorch_cpu -lc10
//   ./run_pt2 ops/_C.abi3.so model.pt2 [uint8] < images
#include <ATen/ops/from_blob.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <iterator>
#include <string>

void run(const char* model, at::ScalarType dtype) {
  torch::inductor::AOTIModelPackageLoader network(model);
  std::string pixels(std::istreambuf_iterator<char>(std::cin), {});
  const int64_t bytes = 28 * 28 * c10::elementSize(dtype), images = pixels.size() / bytes;
  TORCH_CHECK(images * bytes == int64_t(pixels.size()), "an image has ", bytes, " bytes");
  const int64_t batch = std::max<int64_t>(2, images);  // the compiled network takes two or more
  pixels.resize(batch * bytes);
  const at::Tensor input = at::from_blob(pixels.data(), {batch, 1, 28, 28}, dtype);
  const at::Tensor logits = network.run(std::vector<at::Tensor>{input})[0].contiguous();
  for (int64_t i = 0; i < images * logits.size(1); ++i) {
    std::cout << logits.const_data_ptr<float>()[i] << ((i + 1) % logits.size(1) ? ' ' : '\n');
  }
}

int main(int argc, char** argv) {
  const bool integers = argc == 4 && argv[3] == std::string("uint8");
  if (argc != 3 && !integers) {
    std::cerr << "usage: run_pt2 LIBRARY MODEL [uint8] < IMAGES\n";
    return 2;
  }
  if (!dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL)) {  // registers the operators
    std::cerr << dlerror() << '\n';
    return 2;
  }
  setenv("AOTI_RUNTIME_CHECK_INPUTS", "1", 1);  // otherwise dtype and sizes are not checked
  try {
    run(argv[2], integers ? at::kByte : at::kFloat);
  } catch (const std::exception& error) {
    const std::string text = error.what();
    std::cerr << argv[2] << ": " << text.substr(0, text.find('\n')) << '\n';
    return 2;
  }
}
