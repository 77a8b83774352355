# Sourced by scripts/test, scripts/bench and the gate: installs the Debian packages that they need.

# Each package with the command that shows that it is installed.
install_packages() {
    local missing=()
    python3 -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3 python3-venv)
    command -v curl >/dev/null || missing+=(curl)
    command -v systemd-analyze >/dev/null || missing+=(systemd)
    command -v java >/dev/null || missing+=(openjdk-17-jdk-headless)
    command -v mvn >/dev/null || missing+=(maven)
    command -v memcached >/dev/null || missing+=(memcached)
    command -v redis-server >/dev/null || missing+=(redis-server)
    command -v chromium >/dev/null || missing+=(chromium)
    has_postgresql || missing+=(postgresql)
    command -v pgbouncer >/dev/null || missing+=(pgbouncer)
    command -v nginx >/dev/null || missing+=(nginx)
    command -v haproxy >/dev/null || missing+=(haproxy)
    command -v go >/dev/null || missing+=(golang-go)
    command -v cargo >/dev/null || missing+=(cargo)
    command -v cc >/dev/null || missing+=(gcc libc6-dev)
    command -v npm >/dev/null || missing+=(nodejs npm)
    command -v prometheus >/dev/null || missing+=(prometheus)
    # They build and run the image without a container engine; the keyring is debootstrap's.
    command -v buildah >/dev/null || missing+=(buildah)
    command -v debootstrap >/dev/null || missing+=(debootstrap debian-archive-keyring)
    install_missing "${missing[@]}"
}

# The load generator, and the peers that the benchmarks start beside ours.
install_bench_packages() {
    local missing=()
    command -v wrk >/dev/null || missing+=(wrk)
    command -v redis-server >/dev/null || missing+=(redis-server)
    has_postgresql || missing+=(postgresql)
    install_missing "${missing[@]}"
}

# Debian's package puts the server's programs beside the path.
has_postgresql() {
    compgen -G '/usr/lib/postgresql/*/bin/postgres' >/dev/null
}

install_missing() {
    [ "$#" -gt 0 ] || return 0
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "Not installed: $*. Install them as root with apt-get, or what needs them is left out." >&2
    elif may_install "$@"; then
        install_debian "$@"
    fi
}

# Asks on a terminal. Without one, only CI=true agrees.
may_install() {
    local answer=''
    [ "${CI:-}" != true ] || return 0
    if [ -t 0 ]; then
        read -r -p "Install the Debian packages $*? [y/N] " answer
    fi
    case $answer in
    [yY]*) ;;
    *)
        echo "Not installed: $*. What needs them is left out; CI=true installs them unasked." >&2
        return 1
        ;;
    esac
}

install_debian() {
    apt-get update -q && without_services \
        env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "$@"
}

# Runs a command during which no package may start its service: it would take a port, and CPU from what is measured.
without_services() (
    policy=/usr/sbin/policy-rc.d
    # If one exists, as in most containers, keep it.
    if [ ! -e "$policy" ]; then
        trap 'rm -f -- "$policy"' EXIT
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod 755 "$policy"
    fi
    "$@"
)
