# One image for every command of the service: `counter serve`, `counter rollup`, `counter schema apply`.
ARG BASE=python:3.11.14-slim-bookworm

FROM ${BASE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
# First what is locked: it changes less often than the code. Wheels only, because a build could run any code.
COPY requirements.lock ./
RUN pip download --require-hashes --only-binary :all: --dest /wheels -r requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY counter counter
COPY rollup rollup
COPY api api
COPY clients/python clients/python
RUN pip wheel --no-index --find-links /wheels --no-deps --wheel-dir /wheels . ./clients/python
# Extras of pyproject.toml, all of them by default; `--build-arg EXTRAS=` is enough to serve with SQLite.
ARG EXTRAS=cassandra,client,dynamodb,memcached,otel,postgresql,redis
# Only what the extras need: neither pip nor what built the wheels.
RUN python -m venv --without-pip /opt/counter \
    && pip --python /opt/counter/bin/python install --no-index --find-links /wheels \
        "distributed-counter-server[${EXTRAS}]" \
    # Of the SDK of AWS only what describes DynamoDB, and where credentials come from.
    && find /opt/counter -path "*/botocore/data/*" -type d -prune \
        ! -name dynamodb ! -name sts ! -name "sso*" ! -name signin -exec rm -r {} +

FROM ${BASE}
LABEL org.opencontainers.image.title="Distributed counter" \
      org.opencontainers.image.version="0.2.0.dev0" \
      org.opencontainers.image.licenses="Apache-2.0 AND MIT"
# Nothing is installed in a container. The user is a number, so that an orchestrator can see that it is not root. /data
# is for SQLite.
RUN pip uninstall --yes --root-user-action=ignore pip setuptools wheel \
    && rm -r "$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')/ensurepip" \
    && useradd --system --no-create-home --uid 10001 counter \
    && install --directory --owner=10001 --group=10001 /data
COPY --from=build /opt/counter /opt/counter
ENV PATH=/opt/counter/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    COUNTER_HOST=0.0.0.0 \
    COUNTER_DATA=/data
USER 10001:10001
WORKDIR /data
VOLUME /data
EXPOSE 8080
STOPSIGNAL SIGTERM
# It listens on all addresses of its container, so it requires API keys and TLS, or COUNTER_INSECURE=true if only this
# machine can reach it. If it has a certificate of its own, give it a health check that speaks HTTPS.
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8080/readyz', timeout=4)"]
ENTRYPOINT ["counter"]
CMD ["serve"]
