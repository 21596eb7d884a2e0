FROM --platform=$BUILDPLATFORM golang:1.26.8-bookworm AS build
# Full versions: a tag of two numbers is another image next month. Where your registry can be asked, pin the digest as well
# (golang:…@sha256:…, docker buildx imagetools inspect says it).
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
ARG TARGETOS TARGETARCH VERSION=dev COMMIT=
RUN GOOS=${TARGETOS} GOARCH=${TARGETARCH} OUT=/image/ ./scripts/build ./cmd/outflow
# What an empty image lacks: certificates, a user, and a folder for transactions that are too large for memory. And what the licences
# of all that is linked in ask for.
RUN mkdir -p /image/etc/ssl/certs \
 && mkdir -m 1777 /image/tmp \
 && cp /etc/ssl/certs/ca-certificates.crt /image/etc/ssl/certs/ \
 && echo 'outflow:x:65532:65532::/tmp:/sbin/nologin' > /image/etc/passwd \
 && ./scripts/licences /image/licences

FROM scratch
COPY --from=build /image /
USER 65532:65532
# Inside a container the loopback address is the container's own. Publish the port with care: the page shows subjects and LSNs.
ENV OUTFLOW_LISTEN=0.0.0.0:7422
EXPOSE 7422
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s --retries=3 CMD ["/outflow", "healthcheck"]
ENTRYPOINT ["/outflow"]
CMD ["run"]
