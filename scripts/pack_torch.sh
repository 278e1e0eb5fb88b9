#!/usr/bin/env bash
# Pack a newer torch and triton for a GPU machine without a network, in parts that can be carried one by one:
#   scripts/pack_torch.sh 2.14.1 3.8.0 OUT        writes OUT/part00, OUT/part01, ... and OUT/SHA256
# What is left out: headers, static libraries, tests, debug symbols, the machine code of GPUs other than sm_90 (H100, H200),
# and AMD's part of triton. NVIDIA's libraries are those of the torch that the machine has, except NCCL and NVSHMEM, of
# which a newer torch calls functions that older ones lack. torch 2.14.1 ran on an H100 beside the libraries of torch 2.11.
# On that machine, with all parts in PARTS:
#   mkdir -p SITE && cat PARTS/part* | xz -d | tar -x -C SITE
#   old=$(python3 -c 'import nvidia; print(list(nvidia.__path__)[0])')
#   for d in $old/*; do [ -e SITE/nvidia/$(basename $d) ] || ln -s $d SITE/nvidia/; done
#   export PYTHONPATH=SITE PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK=1
set -euo pipefail
torch=$1 triton=$2 out=$(realpath -m "$3")
here=$(cd "$(dirname "$0")" && pwd)
download=$out/download
part_mib=${PART_MIB:-54}
work=$(mktemp -d /tmp/pack_torch.XXXXXX)
trap 'rm -rf "$work"' EXIT
mkdir -p "$download" "$out"

fetch() {
    PIP_CONFIG_FILE=/dev/null python3 -m pip download --quiet --no-deps --only-binary=:all: \
        --python-version 3.12 --implementation cp --platform manylinux_2_28_x86_64 \
        --platform manylinux_2_27_x86_64 --platform manylinux_2_18_x86_64 \
        --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --dest "$download" "$1"
}
fetch "torch==$torch"
fetch "triton==$triton"
nccl=$(unzip -p "$download/torch-$torch"-*.whl '*/METADATA' |
    sed -n 's/^Requires-Dist: nvidia-nccl-cu13==\([0-9.]*\).*/\1/p')
fetch "nvidia-nccl-cu13==$nccl"
# torch 2.15 does not load with the machine's NVSHMEM 3.4.5. 2.14.1 asks for that one.
nvshmem=$(unzip -p "$download/torch-$torch"-*.whl '*/METADATA' |
    sed -n 's/^Requires-Dist: nvidia-nvshmem-cu13==\([0-9.]*\).*/\1/p')
fetch "nvidia-nvshmem-cu13==$nvshmem"

cd "$work"
mkdir site
unzip -q "$download/torch-$torch"-*.whl -d site -x 'torch/include/*' 'torch/test/*' 'torch/bin/protoc*' \
    'torch/lib/*.a' 'torch/share/*' 'torchgen/packaged/autograd/*' '*.pyi' 'torch/lib/libtorchbind_test*' \
    'torch/lib/libjitbackend_test*' 'torch/lib/libbackend_with_compiler*' 'torch/lib/libaoti_custom_ops*'
unzip -q "$download/triton-$triton"-*.whl -d site -x '*.a' 'triton/backends/amd/lib/*' \
    'triton/backends/nvidia/bin/ptxas-blackwell' 'triton/backends/nvidia/bin/nvdisasm*' \
    'triton/backends/nvidia/bin/cuobjdump*' 'triton/backends/nvidia/lib/cupti*' '*libnvperf*' \
    'triton/instrumentation/*'
unzip -q "$download/nvidia_nccl_cu13-$nccl"-*.whl -d site -x '*/include/*' '*.a'
unzip -q "$download/nvidia_nvshmem_cu13-$nvshmem"-*.whl 'nvidia/nvshmem/lib/libnvshmem_host.so*' -d site

# Debug symbols are half of triton's library.
find site -name '*.so*' -type f -exec strip --strip-unneeded {} +
for library in site/torch/lib/libtorch_cuda*.so site/torch/lib/libtorch_nvshmem.so \
    site/nvidia/nccl/lib/libnccl.so.2; do
    python3 "$here/pack_torch_strip.py" "$library" 90
done

rm -f "$out"/part* "$out"/SHA256
tar --create --sort=name --owner=0 --group=0 --mtime=2026-01-01 -C site . |
    xz --format=xz -T2 ${XZ:--6} | split --bytes="${part_mib}MiB" --numeric-suffixes - "$out/part"
(cd "$out" && sha256sum part* >SHA256)
du -sm --apparent-size site
ls -l "$out"
