# Sourced by the other scripts: `setup LOCK` installs the packages of LOCK, the service and the client into .venv.

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv
python=$venv/bin/python

fail() {
    printf '%s\n' "$@" >&2
    exit 1
}

# The first interpreter that is new enough and can make virtual environments; $PYTHON overrules the search.
find_python() {
    local candidate version old='' bare=''
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python}; do
        version=$("$candidate" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null) || continue
        if ! "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            old="$old $candidate is $version;"
        elif ! "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
            bare=${bare:-"$candidate ($version)"}
        else
            echo "$candidate"
            return
        fi
    done
    [ -z "$bare" ] || fail "$bare cannot make virtual environments: its venv or ensurepip module is missing." \
        "Install it (Debian, Ubuntu: apt-get install python3-venv) and start again."
    fail "Python 3.11 or newer is needed; found:${old:- none;} PYTHON=/path/to/python names another one."
}

# What an installed environment depends on: its place, its interpreter (a system upgrade may swap that), the lock and
# both projects. Compared whole with its copy in .venv, which is exact and needs no hash tool.
state() {
    printf '%s\n' "$root" "$(readlink -f -- "$python")"
    cat -- "$root/pyproject.toml" "$root/clients/python/pyproject.toml" "$root/$1"
}

is_ready() {
    [ -x "$python" ] && state "$1" | cmp -s - "$venv/installed-$1"
}

mark_installed() {
    local lock
    for lock in "$@"; do
        state "$lock" >"$venv/installed-$lock"
    done
}

# uv installs the many packages of the tests in a fraction of pip's time. It does not read pip's configuration, so pip
# goes on if it fails.
install_lock() {
    local pip=("$python" -m pip install --quiet --disable-pip-version-check --require-hashes)
    if [ "$1" = requirements-dev.lock ] &&
        sed -n '/^uv==/,/^    # via/p' "$root/$1" | "${pip[@]}" -r /dev/stdin; then
        "$venv/bin/uv" pip install --quiet --python "$python" --require-hashes --compile-bytecode -r "$root/$1" && return
    fi
    "${pip[@]}" -r "$root/$1"
}

install() {
    local base
    if ! "$python" -m pip --version >/dev/null 2>&1; then
        base=$(find_python) || exit
        echo "Making $venv with $base ($("$base" -c 'import platform; print(platform.python_version())'))" >&2
        "$base" -m venv --clear "$venv" || fail "No virtual environment could be made in $venv."
    fi
    rm -f -- "$venv"/installed-*
    echo "Installing what $1 locks (only on the first start and after a change)" >&2
    install_lock "$1" &&
        "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps \
            --no-build-isolation --editable "$root" --editable "$root/clients/python" ||
        fail "The installation into $venv failed; the reason is above. Run it again to continue."
    # Where PYTHONDONTWRITEBYTECODE is set, each start would compile every module.
    (cd -- "$root" && "$python" -m compileall -q counter rollup api clients/python/counter_client)
    mark_installed "$1"
    # Each lock holds all of the shorter ones, at the same versions.
    case $1 in
    requirements-dev.lock) mark_installed requirements-bench.lock requirements.lock ;;
    requirements-bench.lock) mark_installed requirements.lock ;;
    esac
}

# Installs what FOLDER/package-lock.json locks into FOLDER/node_modules, once for each lock. Packages run no scripts.
install_node() {
    local lock=$root/$1/package-lock.json kept=$root/$1/node_modules/installed-package-lock.json
    cmp -s -- "$lock" "$kept" && return
    (
        ! command -v flock >/dev/null || flock 9
        cmp -s -- "$lock" "$kept" && exit
        echo "Installing what $1/package-lock.json locks (only on the first start and after a change)" >&2
        npm ci --prefix "$root/$1" --ignore-scripts --no-audit --no-fund --loglevel=error >&2 &&
            cp -- "$lock" "$kept"
    ) 9<"$lock"
}

# One setup at a time where flock exists; the lock ends with the subshell, before the caller goes on.
setup() {
    is_ready "$1" && return
    (
        if command -v flock >/dev/null && ! flock --nonblock 9; then
            echo "Waiting for another setup of $venv to finish" >&2
            flock 9
        fi
        is_ready "$1" || install "$1"
    ) 9<"$root/scripts/setup.sh" || exit
}
