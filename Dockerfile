# One image for every command of the service: `counter serve`, `counter rollup`, `counter schema apply`.
ARG PYTHON=3.11.14-slim-bookworm

FROM python:${PYTHON} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python -m venv /opt/counter
# First what is locked: it changes less often than the code.
COPY requirements.lock ./
RUN /opt/counter/bin/pip install --require-hashes -r requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY counter counter
COPY rollup rollup
COPY api api
COPY clients/python clients/python
RUN /opt/counter/bin/pip install --no-index --no-deps --no-build-isolation . ./clients/python

FROM python:${PYTHON}
LABEL org.opencontainers.image.title="Distributed counter" \
      org.opencontainers.image.licenses="Apache-2.0"
# It listens on all addresses of its container, and so wants API keys and TLS; where only this machine can reach it, say so
# with COUNTER_INSECURE=true. Where it has a certificate of its own, give it a health check that speaks HTTPS.
# A number, so that an orchestrator can see that it is not root. /data is for SQLite.
RUN useradd --system --no-create-home --uid 10001 counter \
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
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8080/readyz', timeout=4)"]
ENTRYPOINT ["counter"]
CMD ["serve"]
