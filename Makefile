# Thin wrappers: the build itself is CMake's.
.PHONY: test bench
test:
	@tools/install_deps.sh
	cmake --preset cpu
	cmake --build --preset cpu
	python3 tools/check_includes.py
	ctest --preset cpu -j 2
