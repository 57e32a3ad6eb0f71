// Translates one sentence: the program of the README.
#include <iostream>

#include "frit/infer/translator.h"

int main(int argc, char** argv) {
  frit::ThreadPool pool;
  frit::Translator translator(argc > 1 ? argv[1] : "example_run/model", pool);
  std::cout << translator.translate("the small dog sees the red house") << "\n";
}
