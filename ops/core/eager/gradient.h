// Node of the autograd graph that calls a backward operator.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace ops {

using c10::IValue;
using c10::OperatorHandle;
using torch::autograd::variable_list;
using torch::jit::Stack;

// Source of an argument of the backward operator. `index` counts gradients (grad), forward outputs
// (output) or forward arguments (tensor, constant, and the properties height, width and
// channels_last); mask has none. Python sends the letters (ops/core/gradient.py).
struct Source {
  enum Kind : char {
    grad = 'g',
    mask = 'm',
    tensor = 't',
    output = 'o',
    constant = 'c',
    height = 'h',
    width = 'w',
    channels_last = 'l'
  } kind;
  size_t index;
};

// Call of the backward operator of a forward operator.
struct BackwardCall {
  OperatorHandle op;
  std::vector<Source> sources;
  std::vector<size_t> tensors;  // indices of forward's tensor arguments, except mutable ones
  size_t grads;                 // number of leading forward outputs that have gradients
};

inline IValue to_value(const at::Tensor& x) {
  return x.defined() ? IValue(x) : IValue();
}

// Node of the autograd graph, with an edge for each of BackwardCall::tensors. PyTorch's Function is
// slower: it copies all arguments, and demangles a class name in each backward pass.
class GradientNode : public torch::autograd::Node {
 public:
  explicit GradientNode(const BackwardCall& backward)
      : backward_(backward), saved_(backward.sources.size()), constants_(backward.sources.size()) {}

  void save_arguments(c10::ArrayRef<IValue> arguments) {
    torch::autograd::edge_list edges;
    edges.reserve(backward_.tensors.size());
    for (const size_t i : backward_.tensors) {
      edges.push_back(arguments[i].isTensor()
                          ? torch::autograd::impl::gradient_edge(arguments[i].toTensor())
                          : torch::autograd::Edge());
    }
    set_next_edges(std::move(edges));
    for (size_t k = 0; k < saved_.size(); ++k) {
      const auto& [kind, i] = backward_.sources[k];
      switch (kind) {
        case Source::grad:
        case Source::mask:
        case Source::output: break;
        case Source::tensor: save(k, arguments[i], false); break;
        case Source::constant: constants_[k] = arguments[i]; break;
        case Source::height: constants_[k] = arguments[i].toTensor().sym_size(-2); break;
        case Source::width: constants_[k] = arguments[i].toTensor().sym_size(-1); break;
        case Source::channels_last:
          constants_[k] =
              arguments[i].toTensor().suggest_memory_format() != at::MemoryFormat::Contiguous;
      }
    }
  }

  void save_outputs(c10::ArrayRef<IValue> outputs) {
    for (size_t k = 0; k < saved_.size(); ++k) {
      const auto& [kind, i] = backward_.sources[k];
      if (kind == Source::output) {
        save(k, outputs[i], i < backward_.grads);
      }
    }
  }

  std::string name() const override { return backward_.op.schema().name(); }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return call(backward_, grads, unpack(), constants_, needed());
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& x : saved_) {
      x.reset_data();
    }
  }

  // Compiled autograd: collect the key of its cache.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.collect(reinterpret_cast<uint64_t>(&backward_));
    for (size_t k = 0; k < saved_.size(); ++k) {
      args.collect(saved_[k], backward_.sources[k].kind == Source::output);
    }
    for (const IValue& value : constants_) {
      args.collect(value, /*nested=*/true);
    }
  }

  // Compiled autograd: add the call to its graph as one node.
  variable_list apply_with_saved(const variable_list& grads,
                                 torch::dynamo::autograd::SwapSavedVariables& swap) override {
    using namespace torch::dynamo::autograd;  // NOLINT
    swap.before(saved_);
    PackedArgs packed;
    packed.pack(unpack());
    swap.after(saved_);
    const auto args = std::move(packed).vec();
    const auto function = [&backward = backward_, constants = constants_, needed = needed()](
                              const variable_list& grads, const std::vector<IValue>& args) {
      return call(backward, grads, PackedArgs(args).unpack<variable_list>(), constants, needed);
    };
    const auto& compiler = getPyCompilerInterface();
    const auto bound = compiler->bind_function(swap.get_py_compiler(), name(), function,
                                               {args[0].type()}, /*is_custom_function=*/true);
    return compiler->call_function(swap.get_py_compiler(), "apply_functional", bound, grads, args,
                                   IValuePacker<std::vector<std::optional<InputMetadata>>>::pack(
                                       get_input_metadata(next_edges())));
  }

 private:
  // Call the backward operator; return a gradient for each tensor that needs one, else undefined.
  static variable_list call(const BackwardCall& backward, const variable_list& grads,
                            const variable_list& saved, const std::vector<IValue>& constants,
                            const std::vector<bool>& needed) {
    variable_list gradients(needed.size());
    if (std::none_of(grads.begin(), grads.end(), [](const auto& x) { return x.defined(); })) {
      return gradients;
    }
    Stack stack;
    stack.reserve(backward.sources.size());
    for (size_t k = 0; k < saved.size(); ++k) {
      const auto& [kind, i] = backward.sources[k];
      switch (kind) {
        case Source::grad: stack.push_back(to_value(grads[i])); break;
        case Source::mask: stack.emplace_back(needed); break;
        case Source::tensor:
        case Source::output: stack.push_back(to_value(saved[k])); break;
        default: stack.push_back(constants[k]);
      }
    }
    backward.op.callBoxed(stack);
    for (size_t i = 0; i < stack.size(); ++i) {
      if (needed[i]) {
        gradients[i] = std::move(stack[i]).toTensor();
      }
    }
    return gradients;
  }

  void save(size_t k, const IValue& value, bool is_output) {
    if (value.isTensor()) {
      saved_[k] = torch::autograd::SavedVariable(value.toTensor(), is_output);
    }
  }

  variable_list unpack() {
    variable_list tensors(saved_.size());
    for (size_t k = 0; k < saved_.size(); ++k) {
      // Of an input that was detached in place since, unpack() raises.
      tensors[k] = backward_.sources[k].kind == Source::output ? saved_[k].unpack(getptr())
                                                               : saved_[k].unpack();
    }
    return tensors;
  }

  // Return one bool for each of BackwardCall::tensors: whether its gradient is needed.
  std::vector<bool> needed() const {
    std::vector<bool> needed(backward_.tensors.size());
    for (size_t i = 0; i < needed.size(); ++i) {
      needed[i] = task_should_compute_output(i);
    }
    return needed;
  }

  const BackwardCall& backward_;
  // One entry for each source.
  std::vector<torch::autograd::SavedVariable> saved_;  // undefined unless tensor or output
  std::vector<IValue> constants_;                      // None for grad, mask, tensor and output
};

// Return a new node: a std::shared_ptr if torch is older than 2.14, else an intrusive_ptr.
template <typename Pointer = decltype(torch::autograd::Edge::function)>
auto make_node(const BackwardCall& backward) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    return std::shared_ptr<GradientNode>(new GradientNode(backward),
                                         [](auto* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<GradientNode>(backward);
  }
}

}  // namespace ops
