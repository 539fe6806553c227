#!/bin/sh
# ptxas_check.sh NVCC ARGUMENT...: compiles, and fails where ptxas reports what these kernels must not have: spilled
# registers, a local stack frame, or wgmma that it had to serialise (C75xx). Any of them costs a multiple of the time
# and changes no result, so that no test would see it. ptxas's report is kept beside the object (OBJECT.ptxas).
set -u
object='' previous=''
for argument in "$@"; do
  [ "$previous" != -o ] || object=$argument
  previous=$argument
done
report=${object:-/tmp/ptxas.$$}.ptxas

"$@" 2>"$report"
status=$?
# What is not ptxas's account of registers is for the reader: errors, warnings.
grep -Ev '^ptxas info|bytes stack frame|^ *$' "$report" >&2
[ "$status" -eq 0 ] || exit "$status"

bad=$(awk '
  /Function properties for|Compiling entry function/ { name = $NF == "'"'sm_90a'"'" ? $(NF - 2) : $NF }
  /C75[0-9][0-9]/ { print; next }
  /bytes stack frame/ && !/ 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads/ { print name ": " $0 }
' "$report")
[ -n "$object" ] || rm -f "$report"
[ -n "$bad" ] || exit 0
{
  echo "ptxas: expected no spills, no stack frame and no serialised wgmma, got"
  echo "$bad" | { command -v c++filt >/dev/null && c++filt || cat; }
} >&2
[ -z "$object" ] || rm -f "$object"
exit 1
