#!/bin/sh
# check_machine.sh PYTHON [venv]: prints one line that says what this machine lacks to build ktmoe and what to install; nothing if
# nothing is lacking. venv: to make a virtual environment, too. CC chooses the compiler.
python=$1
version_of='import sys; print("%d.%d" % sys.version_info[:2])'

if ! version=$("$python" -c "$version_of" 2>/dev/null); then
    echo "ktmoe needs Python 3.11 or newer, and '$python' does not run. Debian, Ubuntu: apt install python3 python3-venv python3-dev gcc libc6-dev. Fedora: dnf install python3 python3-devel gcc"
    exit
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "ktmoe needs Python 3.11 or newer, and '$python' is $version. Debian, Ubuntu: apt install python3.12 python3.12-venv python3.12-dev. Fedora: dnf install python3.12 python3.12-devel. Then put PYTHON=python3.12 before make"
    exit
fi

missing='' debian='' fedora=''
need() { # what, Debian's package, Fedora's
    missing="$missing${missing:+, }$1" debian="$debian $2" fedora="$fedora $3"
}

if [ "$2" = venv ] && ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    need "Python's venv and ensurepip" "python$version-venv" "python3-libs"
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
printf '#include <stdio.h>\nint main(void) { return puts("") < 0; }\n' >"$folder/probe.c"
compiler=${CC:-$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("CC") or "cc")')}
# unquoted: CC may have arguments. A build may find Python.h by CPATH or the flags, too.
if [ ! -f "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] &&
    ! printf '#include <Python.h>\n' | $compiler $CPPFLAGS $CFLAGS -E -x c - >/dev/null 2>&1; then
    need Python.h "python$version-dev" python3-devel
fi
if ! $compiler "$folder/probe.c" -o "$folder/probe" 2>/dev/null; then
    need "a working C compiler (tried: $compiler)" "gcc libc6-dev" "gcc glibc-devel"
fi
[ -z "$missing" ] || echo "ktmoe needs $missing. Debian, Ubuntu: apt install$debian. Fedora: dnf install$fedora"
