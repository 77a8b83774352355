# Sourced by scripts/test and the gate: installs the Debian packages that tests need.

# Each package with the command that shows it is there. Without root or apt-get nothing is installed.
install_packages() {
    local missing=()
    python3 -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3 python3-venv)
    command -v curl >/dev/null || missing+=(curl)
    command -v java >/dev/null || missing+=(openjdk-17-jdk-headless)
    command -v mvn >/dev/null || missing+=(maven)
    command -v memcached >/dev/null || missing+=(memcached)
    [ "${#missing[@]}" -gt 0 ] || return 0
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "Missing, and only root can install it (apt-get install ${missing[*]})" >&2
        return 0
    fi
    apt-get update -q &&
        DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}"
}
