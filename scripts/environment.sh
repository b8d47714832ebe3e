# shellcheck shell=bash
# The pinned environment in .venv: made once, remade when its requirement files change.
#
#     source scripts/environment.sh [test]     make it and enter it; `test` adds what the tests need: .venv-sglang, -extras, -fp8, -tinker
#     bash scripts/environment.sh [test]       only make it
#
# PYTHON chooses the interpreter, LIGHTRFT_VENV another folder.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${LIGHTRFT_VENV:-$root/.venv}

if [[ ${BASH_SOURCE[0]} != "$0" ]]; then
    bash "${BASH_SOURCE[0]}" "$@" || return
    export PATH=$venv/bin:$PATH VIRTUAL_ENV=$venv
    export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
    unset PYTHONDONTWRITEBYTECODE # otherwise each process compiles torch, transformers and vLLM anew, for ten seconds
    cd "$root" || return
    return
fi

set -euo pipefail
stamp=$venv/lightrft-requirements # of whole installations; "unfinished" while one is under way

# Prints the version of an interpreter that is new enough and can make environments, and the microseconds it takes to compile.
probe='import ensurepip, sys, time, venv
if sys.version_info < (3, 11):
    sys.exit(1)
def seconds():
    began = time.process_time()
    compile("x = x + 1\n" * 5000, "", "exec")
    return time.process_time() - began
print("%d.%d" % sys.version_info[:2], int(1e6 * min(seconds() for _ in range(3))))'

# Print the first interpreter of PATH, or one of the same version that is clearly faster. One that was built without
# profile-guided optimization, which is pyenv's default, compiles 1.5 times as long, and the tests take 1.1 times as long.
find_python() {
    local candidate version microseconds chosen="" chosen_version="" least=0
    for candidate in ${PYTHON:-$(type -ap python3 python3.13 python3.12 python3.11)}; do
        read -r version microseconds < <("$candidate" -c "$probe" 2>/dev/null) || continue
        if [[ -z $chosen ]] || { [[ $version == "$chosen_version" ]] && ((5 * microseconds < 4 * least)); }; then
            chosen=$candidate chosen_version=$version least=$microseconds
        fi
    done
    if [[ -n $chosen ]]; then
        echo "$chosen"
        return
    fi
    candidate=${PYTHON:-python3}
    echo "lightrft needs Python 3.11 or newer, with venv; $candidate is $("$candidate" --version 2>&1 || true)." >&2
    echo "Install one, or name it: PYTHON=/path/to/python3.12 bash scripts/quickstart.sh" >&2
    return 1
}

pip_install() {
    "$venv/bin/python" -m pip ${into:+--python "$into"} install --quiet --disable-pip-version-check --no-compile "$@"
}

make_environment() {
    local python
    python=$(find_python)
    echo "environment: making $venv with $("$python" --version)"
    rm -rf "$venv"
    mkdir -p "$venv"
    echo unfinished >"$stamp"
    "$python" -m venv "$venv"
    echo "environment: installing torch (1 of 2)"
    pip_install torch==2.13.0
    echo "environment: installing $(grep -c == "$root/requirements/cpu.txt") other packages, vLLM among them (2 of 2)"
    pip_install --no-deps -r "$root/requirements/cpu.txt"
    pip_install --no-deps --no-build-isolation -e "$root"
    echo new >"$stamp-package"
    echo "environment: ready after $SECONDS s"
}

wanted="$root $(cksum <"$root/requirements/cpu.txt")"
if [[ -e $venv && ! -e $stamp ]]; then
    echo "$venv exists and was not made by this script: move it away, or choose LIGHTRFT_VENV=another/folder" >&2
    exit 1
fi
made_for=$(cut -d' ' -f1 "$stamp" 2>/dev/null || true)
if [[ -n ${LIGHTRFT_VENV:-} && $made_for == /* && $made_for != "$root" && -e $made_for/scripts/environment.sh ]]; then
    echo "$venv is the environment of $made_for, and may be in use: choose another folder with LIGHTRFT_VENV" >&2
    exit 1
fi
if [[ $(cat "$stamp" 2>/dev/null) != "$wanted" ]]; then
    make_environment
    echo "$wanted" >"$stamp"
fi

installed_from=$(cksum <"$root/setup.py") # entry points are copied when the package is installed
if [[ $(cat "$stamp-package" 2>/dev/null) != "$installed_from" ]]; then
    [[ $(cat "$stamp-package" 2>/dev/null) == new ]] || pip_install --no-deps --no-build-isolation -e "$root"
    echo "$installed_from" >"$stamp-package"
fi

wanted_by_tests=$(cat "$root"/requirements/{test,notebook}.txt | cksum)
if [[ ${1:-} == test && $(cat "$stamp-test" 2>/dev/null) != "$wanted_by_tests" ]]; then
    echo "environment: installing what the tests need"
    pip_install --no-deps --force-reinstall -r "$root/requirements/notebook.txt" -r "$root/requirements/test.txt"
    echo "$wanted_by_tests" >"$stamp-test"
fi

# make_overlay NAME: an environment over $venv, with the packages of NAME.txt in requirements/
make_overlay() {
    local overlay=$venv-$1
    echo "environment: making $overlay, which lies over $venv"
    rm -rf "$overlay"
    mkdir -p "$overlay"
    echo unfinished >"$overlay/lightrft-requirements"
    "$venv/bin/python" -m venv "$overlay" --without-pip
    into=$overlay/bin/python pip_install --no-deps -r "$root/requirements/$1.txt"
    "$overlay/bin/python" -c 'if True:
        import pathlib, sys, sysconfig
        beneath = sysconfig.get_path("purelib", vars={"base": sys.argv[1]})
        pathlib.Path(sysconfig.get_path("purelib"), "beneath.pth").write_text(beneath)' "$venv"
}

for name in sglang extras fp8 tinker; do
    overlay=$venv-$name
    wanted_there="$wanted $(cksum <"$root/requirements/$name.txt")"
    if [[ ${1:-} == test && $(cat "$overlay/lightrft-requirements" 2>/dev/null) != "$wanted_there" ]]; then
        if [[ -e $overlay && ! -e $overlay/lightrft-requirements ]]; then
            echo "$overlay exists and was not made by this script: move it away" >&2
            exit 1
        fi
        make_overlay "$name"
        echo "$wanted_there" >"$overlay/lightrft-requirements"
    fi
done
