# The server in one image for processors and GPUs. docs/deploy.md says how to build, run and check it.
# The last stage is the server; `--target loadtest` is the harness.
ARG BASE=python:3.13-slim@sha256:7c61056e61ac89e852de05f3dc6fa51a6dd2181797bceed46aa725dd7cb2cd3b

FROM ${BASE} AS packages
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python3 -m venv /opt/pip && python3 -m venv --without-pip /opt/venv
COPY requirements/serve.lock /
# Both secrets are optional. They are pip's settings and a certificate, for a build behind a proxy.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=ca,target=/run/ca.pem \
    /opt/pip/bin/pip --python /opt/venv/bin/python install \
      --require-hashes --only-binary :all: -r /serve.lock

# The bill of materials of what was just installed.
FROM packages AS sbom
COPY deploy/image/sbom.lock /
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=ca,target=/run/ca.pem \
    /opt/pip/bin/pip install --require-hashes --only-binary :all: -r /sbom.lock
RUN /opt/pip/bin/cyclonedx-py environment --output-reproducible --output-file /sbom.cdx.json /opt/venv/bin/python

# The bundled model's graphs. Only a change of the engine, of the kernels or of the model compiles them again.
FROM packages AS graphs
WORKDIR /opt/srm
COPY engine engine
COPY srm srm
COPY mojo_kernels mojo_kernels
COPY models/demo/config.json models/demo/model.safetensors models/demo/
ENV PATH=/opt/venv/bin:$PATH
RUN python -m srm.engine.device.precompile --model models/demo --output /graphs --device cpu --host-cpu x86-64-v3
RUN python -m srm.engine.device.precompile --model models/demo --output /graphs --device cpu --host-cpu x86-64-v4
RUN python -m srm.engine.device.precompile --model models/demo --output /graphs --device cpu --host-cpu cooperlake
RUN python -m srm.engine.device.precompile --model models/demo --output /graphs --device cpu --host-cpu cooperlake --dtype bfloat16
RUN python -m srm.engine.device.precompile --model models/demo --output /graphs --device gpu --gpu-arch sm_90a

FROM packages AS source
WORKDIR /opt/srm
COPY . .
COPY --from=graphs /graphs graphs
COPY --from=sbom /sbom.cdx.json .
RUN rm -r deploy requirements graphs/*.lock \
 && /opt/venv/bin/python -m compileall -q .

FROM ${BASE} AS server
# Some bases bring pip: nothing is to be installed here any more.
RUN if python3 -m pip --version; then python3 -m pip uninstall --yes --root-user-action=ignore pip; fi \
 && useradd --uid 10001 --no-create-home --home-dir /tmp srm \
 && install -d -o srm -g srm /var/lib/srm/graphs /var/lib/srm/data /var/lib/srm/snapshots \
 && printf '#!/bin/sh\nexec /opt/venv/bin/python3 -m srm "$@"\n' > /usr/local/bin/srm && chmod 755 /usr/local/bin/srm
COPY --from=packages /opt/venv /opt/venv
COPY --from=source /opt/srm /opt/srm
ENV PATH=/opt/venv/bin:$PATH \
    HOME=/tmp \
    PYTHONPATH=/opt/srm \
    PYTHONDONTWRITEBYTECODE=1 \
    SRM_HOST=0.0.0.0 \
    SRM_PORT=8000 \
    SRM_GRAPHS_DIR=/opt/srm/graphs \
    SRM_CACHE_DIR=/var/lib/srm/graphs \
    SRM_DATA_DIR=/var/lib/srm/data \
    SRM_SNAPSHOT_DIR=/var/lib/srm/snapshots
VOLUME ["/var/lib/srm/graphs", "/var/lib/srm/data", "/var/lib/srm/snapshots"]
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
# Unready while a graph is compiled, which is no failure in the first ten minutes.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 CMD ["python3", "-ISc", "\
import http.client, os, sys; \
c = http.client.HTTPConnection('127.0.0.1', int(os.environ['SRM_PORT']), timeout=4); \
c.request('GET', '/ready'); \
sys.exit(c.getresponse().status != 200)"]
ARG REVISION=unknown
LABEL org.opencontainers.image.title="srm" \
      org.opencontainers.image.description="Batch inference server for Structured Recurrent Mixers" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.3.0" \
      org.opencontainers.image.revision="${REVISION}"
ENTRYPOINT ["srm"]
CMD ["serve"]

FROM packages AS loadtest-packages
COPY deploy/image/loadtest.lock /
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=ca,target=/run/ca.pem \
    /opt/pip/bin/pip --python /opt/venv/bin/python install \
      --require-hashes --only-binary :all: --no-deps --target /opt/loadtest -r /loadtest.lock

FROM server AS loadtest
COPY --from=loadtest-packages /opt/loadtest /opt/loadtest
ENV PYTHONPATH=/opt/srm:/opt/loadtest
HEALTHCHECK NONE
CMD ["loadtest", "--help"]

FROM server
