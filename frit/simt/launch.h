// launch(): starts a kernel on a Context's GPU, always checked, counted by the Gpu. Host side of a cuda.cu.
#pragma once
#include "frit/backend/context.h"
#include "frit/simt/simt.h"
#ifdef __CUDACC__
#include "frit/backend/cuda/runtime.h"
#endif

namespace frit {

// The grid of a launch: `blocks` blocks of `threads` threads with `shared_bytes` of dynamic shared memory each.
struct Launch {
  int64_t blocks = 0;
  int threads = 0;
  int64_t shared_bytes = 0;
};

struct Launcher {
  static void count(Gpu& gpu) { ++gpu.launches_; }
};

// Typed pointer to a tensor's first element for a kernel; false in the kernel if the tensor is undefined.
// Errors: std::invalid_argument if T (without const) is not the tensor's dtype.
template <typename T>
simt::Global<T> global(const Tensor& t) {
  return simt::Global<T>(t.defined() ? t.data<std::remove_const_t<T>>() : nullptr);
}

// Calls f(T()) with the C++ type of a floating-point dtype: f32, bf16 or f16.
template <typename F>
void dispatch_float(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kF32:
      return f(float());
    case DType::kBF16:
      return f(bfloat16());
    case DType::kF16:
      return f(float16());
    default:
      fail_argument("[dispatch] {} is no floating-point type of a GPU kernel", name_of(dtype));
  }
}

// Which of an operator's kernel instances runs: the one that is forced by name, else what timing found for `key` (a
// shape), else `fallback`. `op` names operator and direction ("layer_norm_forward"). Notes what it chose
// (Context::used). accepts(i): can instance i run this shape? A tuned one that cannot gives way to the fallback, with a
// notice. Errors: std::invalid_argument if the forced one is unknown or cannot run this shape.
template <int n, typename Accepts>
int choose_instance(Context& context, const char* op, std::string_view key, const char* const (&names)[n], int fallback,
                    Accepts&& accepts) {
  const auto index_of = [&](std::string_view name) {
    for (int i = 0; i < n; ++i)
      if (name == names[i]) return i;
    return -1;
  };
  int chosen = fallback;
  if (const std::string_view forced = context.forced(op); !forced.empty()) {
    chosen = index_of(forced);
    FRIT_CHECK(chosen >= 0, "[{}] has no instance {}", op, forced);
    FRIT_CHECK(accepts(chosen), "[{}] instance {} cannot run {}", op, forced, key);
  } else if (context.tuning()) {
    if (const std::string_view tuned = context.tuning()->find(op, key); !tuned.empty()) {
      const int i = index_of(tuned);
      if (i >= 0 && accepts(i))
        chosen = i;
      else
        context.notice(
            fmt::format("{}: the tuned instance {} cannot run {}; {} does", op, tuned, key, names[fallback]));
    }
  }
  context.note_used(op, names[chosen]);
  context.note_key(op, key);
  return chosen;
}

#ifdef __CUDACC__
// Starts kernel(arguments...). Its start may overlap the end of the kernel before it (programmatic dependent launch):
// it waits at wait_for_previous(). blocks == 0 launches nothing. Nothing is launched while the context plans. Errors:
// frit::Error naming the kernel, its grid and the GPU if the launch fails.
template <typename... P, typename... A>
void launch(Context& context, const char* name, void (*kernel)(P...), const Launch& shape, A&&... arguments) {
  if (shape.blocks == 0 || context.planning()) return;
  std::tuple<P...> values(static_cast<P>(arguments)...);
  const size_t sizes[] = {sizeof(P)...};
  std::apply(
      [&](P&... value) {
        void* pointers[] = {const_cast<void*>(static_cast<const void*>(&value))...};
        static_cast<cuda::CudaGpu&>(context.gpu())
            .launch({name, reinterpret_cast<const void*>(kernel), shape.blocks, shape.threads, shape.shared_bytes,
                     pointers, sizes, static_cast<int>(sizeof...(P))});
      },
      values);
  Launcher::count(context.gpu());
}
#else
template <typename... P, typename... A>
void launch(Context& context, const char* name, void (*kernel)(P...), const Launch& shape, A&&... arguments) {
  if (shape.blocks == 0 || context.planning()) return;
  struct Call {
    void (*kernel)(P...);
    std::tuple<P...> arguments;
  };
  const auto run = [](const void* p) {
    const Call& c = *static_cast<const Call*>(p);
    std::apply(c.kernel, c.arguments);
  };
  static_cast<sim::SimGpu&>(context.gpu())
      .launch(name, shape.blocks, shape.threads, shape.shared_bytes,
              {run, std::make_shared<const Call>(Call{kernel, {static_cast<P>(arguments)...}})});
  Launcher::count(context.gpu());
}
#endif

}  // namespace frit
