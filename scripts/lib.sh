# shellcheck shell=bash disable=SC2034
# Sourced by scripts/demo and scripts/test: packages, the Python environment, builds. Works from the project's root.
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

BUILD_PACKAGES=(g++ cmake ninja-build libcli11-dev nlohmann-json3-dev libfmt-dev)

say() { printf '%s\n' "$*"; }

# need_packages NAME...: installs those Debian or Ubuntu packages that are missing, and nothing if none is.
need_packages() {
  if ! command -v dpkg-query >/dev/null; then
    say "Not a Debian or Ubuntu system; these packages, or what yours calls them, are needed: $*"
    return 0
  fi
  local installed name missing=() as_root=()
  installed=$(dpkg-query -W -f '${Package} ${db:Status-Status}\n' "$@" 2>/dev/null || true)
  for name in "$@"; do
    grep -qxF "$name installed" <<<"$installed" || missing+=("$name")
  done
  ((${#missing[@]})) || return 0
  if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null; then
      say "Missing packages and neither root nor sudo. As root, run: apt-get install ${missing[*]}" >&2
      return 2
    fi
    as_root=(sudo)
  fi
  say "Installing packages: ${missing[*]}"
  "${as_root[@]}" apt-get update -qq || say "apt-get update had errors; trying with the lists at hand"
  # Its own account of every file is left out; errors go to stderr.
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    "${missing[@]}" >/dev/null
}

# build PRESET [CMAKE_ARGUMENT...]: into build/PRESET; the arguments count on the first call alone.
build() {
  local preset=$1 quiet=()
  shift
  [ -t 1 ] || quiet=(-- --quiet)  # a line per file is for terminals, where ninja overwrites it
  [ -f "build/$preset/build.ninja" ] || cmake --preset "$preset" "$@" >"build-$preset.log" ||
    { cat "build-$preset.log"; rm -f "build-$preset.log"; return 1; }
  rm -f "build-$preset.log"
  cmake --build --preset "$preset" "${quiet[@]}"
}

# need_venv: .venv with what the Python package and its tests need; pip runs when that list has changed.
# DMATTN_TORCH_SPEC: what to give pip for torch, e.g. "torch --index-url URL" with PyTorch's own index of builds without
# CUDA (200 MB in place of 5 GB).
need_venv() {
  .venv/bin/python -c '' 2>/dev/null || { rm -rf .venv && python3 -m venv .venv; }
  local requirements torch=() stamp=.venv/requirements
  requirements=$(.venv/bin/python scripts/requirements.py)
  read -ra torch <<<"${DMATTN_TORCH_SPEC:-}"
  if [ "$requirements ${torch[*]}" = "$(cat $stamp 2>/dev/null)" ]; then return 0; fi
  say "Installing Python packages into .venv"
  if ((${#torch[@]})); then .venv/bin/pip install --quiet "${torch[@]}"; fi
  xargs -d '\n' .venv/bin/pip install --quiet <<<"$requirements"
  printf '%s\n' "$requirements ${torch[*]}" >$stamp
}
