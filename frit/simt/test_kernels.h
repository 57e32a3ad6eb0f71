// What the simulator's tests share: tensors in a simulator, and launches without a Context.
#pragma once
#include <gtest/gtest.h>

#include <string_view>
#include <tuple>
#include <vector>

#include "frit/simt/simt.h"

namespace frit {

template <typename T>
struct TestTensor {
  T* p = nullptr;
  int64_t count = 0;
  simt::Global<T> global() const { return simt::Global<T>(p); }
  simt::Global<const T> constant() const { return simt::Global<const T>(p); }
};

template <typename T>
constexpr DType kTestDType = sizeof(T) == 1   ? DType::kU8
                             : sizeof(T) == 2 ? DType::kBF16
                             : sizeof(T) == 4 ? DType::kF32
                                              : DType::kI64;

struct SimTest {
  sim::SimGpu gpu;
  std::vector<void*> made;

  SimTest() = default;
  ~SimTest() {
    for (void* p : made) gpu.died(p), gpu.release(p);
  }
  // Elements that nothing has written.
  template <typename T>
  TestTensor<T> tensor(int64_t count) {
    T* p = static_cast<T*>(gpu.allocate(static_cast<size_t>(count) * sizeof(T)));
    gpu.born(p, static_cast<size_t>(count) * sizeof(T), kTestDType<T>);
    made.push_back(p);
    return {p, count};
  }
  template <typename T, typename F>
  void fill_with(TestTensor<T>& x, F&& f) {
    std::vector<T> values(static_cast<size_t>(x.count));
    for (int64_t i = 0; i < x.count; ++i) values[static_cast<size_t>(i)] = static_cast<T>(f(i));
    gpu.upload(x.p, values.data(), values.size() * sizeof(T));
  }
  // f() must throw a Fault whose message holds `text`.
  template <typename F>
  void expect_fault(std::string_view text, F&& f) {
    try {
      f();
    } catch (const sim::Fault& fault) {
      EXPECT_NE(std::string_view(fault.what()).find(text), std::string_view::npos)
          << "got: " << fault.what() << "\nexpected: " << text;
      return;
    }
    ADD_FAILURE() << "no fault; expected: " << text;
  }
  struct Grid {
    int64_t blocks;
    int threads;
    int64_t shared_bytes;
  };
  template <typename... P, typename... A>
  void launch(const char* name, void (*kernel)(P...), Grid grid, A&&... arguments) {
    struct Call {
      void (*kernel)(P...);
      std::tuple<P...> arguments;
    };
    gpu.launch(name, grid.blocks, grid.threads, grid.shared_bytes,
               {[](const void* p) {
                  const Call& c = *static_cast<const Call*>(p);
                  std::apply(c.kernel, c.arguments);
                },
                std::make_shared<const Call>(Call{kernel, {static_cast<P>(arguments)...}})});
  }
};

}  // namespace frit
