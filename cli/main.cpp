// dmattn: what FP8 does to attention's gradients, from the command line.
// Exit codes: 0 done, 1 a check failed, 2 bad input, with one line on stderr that says what to change.
#include <fmt/format.h>

#include <cstdio>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "command.h"
#include "core/error.h"
#include "io/text.h"
#include "output.h"

namespace dmattn::cli {
namespace {

int complain(const std::string& what) {
  say_on_stderr(fmt::format("dmattn: {}\n", one_line(what)));
  return kBadInput;
}

// What is wrong with a command line, and whose help to read. CLI11 only says that a subcommand is required.
std::string fault(const CLI::App& app, const std::vector<Command>& commands, const CLI::ParseError& error) {
  std::vector<std::string> names;
  for (const Command& command : commands) {
    if (command.app->parsed()) {
      return fmt::format("{} (see dmattn {} --help)", one_line(error.what()), command.app->get_name());
    }
    names.push_back(command.app->get_name());
  }
  const std::vector<std::string> rest = app.remaining();
  const std::string what = rest.empty() ? "no command given" : "unknown command or option " + in_quotes(rest.front());
  return fmt::format("{}: the commands are {} (see dmattn --help)", what, fmt::join(names, ", "));
}

int parse_and_run(CLI::App& app, const std::vector<Command>& commands, int argc, char** argv) {
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help) {  // --help, --version
    return app.exit(help) == 0 ? kDone : kBadInput;
  } catch (const CLI::ParseError& error) {
    return complain(fault(app, commands, error));
  }
  for (const Command& command : commands) {
    if (command.app->parsed()) return command.run();
  }
  return complain("no command given");
}

int run(int argc, char** argv) {
  CLI::App app("Measures what FP8 does to the gradients of attention, and what delta matching repairs.", "dmattn");
  app.set_version_flag("--version", DMATTN_VERSION_STRING);
  app.require_subcommand(1);
  app.footer(
      "Examples:\n"
      "  dmattn row                                     one row of dS, number by number\n"
      "  dmattn probe layer.safetensors --html out.html  a real layer, with plots\n"
      "  dmattn COMMAND --help                          options and examples of a command");
  const std::vector<Command> commands{add_row(app),    add_sweep(app),   add_probe(app),
                                      add_report(app), add_certify(app), add_info(app)};
  try {
    return parse_and_run(app, commands, argc, argv);
  } catch (const InvalidValue& error) {
    return complain(error.what());
  } catch (const Unsupported& error) {
    return complain(error.what());
  } catch (const DeviceError& error) {
    return complain(error.what());
  } catch (const std::bad_alloc&) {
    return complain("out of memory: take fewer tokens or heads");
  } catch (const std::exception& error) {
    return complain(std::string("internal error: ") + error.what());
  }
}

}  // namespace
}  // namespace dmattn::cli

int main(int argc, char** argv) { return dmattn::cli::run(argc, argv); }
