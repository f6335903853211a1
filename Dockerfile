# An export behind HTTP, without torch:
#   docker build -t sce-serve .
#   docker run -p 8000:8000 -v "$PWD/exports/clicks:/export:ro" -e SCE_TOKEN=... sce-serve
# A new version is a new directory of the same name, seen from a mount of the one above alone:
#   docker run -p 8000:8000 -v "$PWD/exports:/exports:ro" -e SCE_TOKEN=... sce-serve /exports/clicks --watch
FROM python:3.12-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
COPY constraints.txt /tmp/
COPY --from=build /wheels /wheels
# The wheel without what it names: of that, an export needs all but torch, which is 5.5 GB. Polars reads --titles.
RUN pip install --no-cache-dir --no-deps /wheels/*.whl \
 && pip install --no-cache-dir -c /tmp/constraints.txt \
      numpy rich cyclopts onnxruntime starlette uvicorn httptools uvloop threadpoolctl voyager polars \
 && rm -r /wheels /tmp/constraints.txt \
 && useradd --no-create-home sce
USER sce
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s \
  CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/healthz', timeout=2)"]
ENTRYPOINT ["sce", "serve", "--host", "0.0.0.0", "--port", "8000"]
CMD ["/export"]
