#!/usr/bin/env bash
# Installs the build, moves the tree, and builds and runs the C example from it: once through find_package, once
# through pkg-config. Usage: run.sh SOURCE_DIR BUILD_DIR CC CMAKE GENERATOR
set -euo pipefail
source_dir=$1 build_dir=$2 cc=$3 cmake=$4 generator=$5

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$cmake" --install "$build_dir" --prefix "$work/first" >"$work/install.log"
mv "$work/first" "$work/moved"  # nothing in the tree may remember where it was made
prefix=$work/moved
if grep -rIlF "$work/first" "$prefix" || grep -rIlF "$build_dir" "$prefix"; then
  echo "the files above hold a path of the build" >&2
  exit 1
fi

echo "== find_package"
cp -r "$source_dir/examples/c" "$work/consumer"
"$cmake" -S "$work/consumer" -B "$work/consumer/build" -G "$generator" -DCMAKE_C_COMPILER="$cc" \
  -DCMAKE_PREFIX_PATH="$prefix" >"$work/configure.log" || { cat "$work/configure.log"; exit 1; }
"$cmake" --build "$work/consumer/build" >"$work/build.log" || { cat "$work/build.log"; exit 1; }
"$work/consumer/build/attention"

if command -v pkg-config >/dev/null; then
  echo "== pkg-config"
  pc=$(find "$prefix" -name delta_matching.pc -printf '%h')
  export PKG_CONFIG_PATH=$pc
  # Word splitting of the flags is intended.
  # shellcheck disable=SC2046
  "$cc" -std=c99 -Wall -Wextra -Werror "$source_dir/examples/c/attention.c" -o "$work/attention" \
    $(pkg-config --cflags --libs delta_matching) -lm
  LD_LIBRARY_PATH=${pc%/pkgconfig} "$work/attention" >/dev/null && echo "ran"
else
  echo "== pkg-config is not installed: SKIPPED"
fi

if [ -x "$prefix/bin/dmattn" ]; then
  echo "== the command"
  "$prefix/bin/dmattn" info
fi
