# Thin wrappers: the build itself is CMake's.
.PHONY: demo test test-cpu test-cuda bench
# Installs what is missing, builds, fetches a corpus, trains a translator and translates with it.
demo:
	@tools/demo.sh
test: test-cpu test-cuda
test-cpu:
	@tools/install_deps.sh
	cmake --preset cpu
	cmake --build --preset cpu
	python3 tools/check_includes.py
	python3 tools/check_kernels.py
	tools/check_docs.sh
	python3 tools/gpu_report.py stale bench/results/gpu-ops.json
	ctest --preset cpu -j 2
# The kernels and what runs them, compiled for a GPU; runs nothing.
test-cuda:
	@tools/install_deps.sh --cuda
	cmake --preset cuda
	cmake --build --preset cuda --target gpu_programs
# Operators beside a plain copy of the same bytes (BENCH_FLAGS: flags of Google Benchmark).
bench:
	@tools/install_deps.sh
	cmake --preset cpu
	cmake --build --preset cpu
	build/cpu/frit bench ops -- $(BENCH_FLAGS)
