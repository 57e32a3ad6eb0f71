# Thin wrappers: the build itself is CMake's.
.PHONY: demo test bench
# Installs what is missing, builds, fetches a corpus, trains a translator and translates with it.
demo:
	@tools/demo.sh
test:
	@tools/install_deps.sh
	cmake --preset cpu
	cmake --build --preset cpu
	python3 tools/check_includes.py
	tools/check_docs.sh
	ctest --preset cpu -j 2
# Operators beside a plain copy of the same bytes (BENCH_FLAGS: flags of Google Benchmark).
bench:
	@tools/install_deps.sh
	cmake --preset cpu
	cmake --build --preset cpu
	build/cpu/frit bench ops -- $(BENCH_FLAGS)
