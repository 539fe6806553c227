// Where results go: a page in a file, a document or a table on standard output.
#pragma once

#include <string>
#include <string_view>

namespace dmattn::cli {

// A file to write once, at the end of long work. Made before the work, so that a path that cannot be written is
// known at once; written under another name and moved, so that nobody ever sees half a page.
class OutputFile {
 public:
  // Empty path: no file. Throws InvalidValue naming `option`.
  OutputFile(const std::string& path, const std::string& option);

  explicit operator bool() const { return !path_.empty(); }
  void write(std::string_view content) const;
  bool is(const std::string& other) const;  // the same file

 private:
  std::string path_, option_;  // path_ with symbolic links followed: they stay, their target is replaced
};

// Throws InvalidValue if standard output does not take it all (a full disk).
void print_out(std::string_view text);

// A notice or a complaint. A stderr that cannot be written changes nothing: the exit code has said it.
void say_on_stderr(const std::string& text);

}  // namespace dmattn::cli
