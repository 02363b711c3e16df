"""avx2_guest.py [a command of the shell]: runs it, or the tests of vLLM's plug-in, in a QEMU guest without AVX-512.

The guest boots Debian's kernel. It sees this machine's files, but what it writes stays in its memory. It has no network.
First installs QEMU and fetches a kernel. Ends well, and says why nothing ran, where they cannot be had.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.peers import environments  # noqa: E402

#: Where the kernel and its modules are kept.
FOLDER = ROOT / "build" / "guest"
#: Debian's packages, and the program that is needed of each.
PACKAGES = {"qemu-system-x86": "qemu-system-x86_64", "busybox-static": "busybox", "kmod": "depmod"}
#: What is taken of the kernel's package. All of it is 400 MB.
DRIVERS = ("net/9p", "fs/9p", "fs/netfs", "fs/fscache", "fs/overlayfs", "drivers/virtio")
TAKEN = ("./boot/vmlinuz-*", "*/modules.order", "*/modules.builtin*", *(f"*/kernel/{driver}/*" for driver in DRIVERS))
#: It has AVX2, FMA and F16C, and nothing newer that kernels ask for. What is taken from it here, an emulator would warn of.
CPU = "Haswell-v4,-pcid,-x2apic,-tsc-deadline,-invpcid,-spec-ctrl"
#: What the guest does first.
INIT = """#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t devtmpfs dev /dev
for module in virtio_pci 9pnet_virtio 9p overlay; do modprobe $module; done
mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=512000 host /host
mount -t tmpfs -o size=60% written /written
mkdir /written/files /written/work
mount -t overlay -o lowerdir=/host,upperdir=/written/files,workdir=/written/work tree /tree
mount -t proc proc /tree/proc
mount -t sysfs sys /tree/sys
mount -t devtmpfs dev /tree/dev
mkdir -p /tree/dev/shm /tree/dev/pts
mount -t tmpfs shm /tree/dev/shm
mount -t devpts pts /tree/dev/pts
ifconfig lo 127.0.0.1 up
stty -F /dev/ttyS1 raw
cp /command /tree/command
chroot /tree /bin/sh /command </dev/null >/dev/ttyS1 2>&1
echo $? >/dev/ttyS2
poweroff -f
"""


class Missing(Exception):
    """What a guest needs cannot be had here."""


def main(arguments: list[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # or QEMU would outlive this process
    try:
        command = " ".join(arguments) or tests()
        install()
        return run(command)
    except (Missing, environments.SetUpError) as error:
        print(f"ktmoe: nothing ran in a guest: {error}", flush=True)
        return 0


def tests() -> str:
    """The command that runs those that depend on the instruction set. All others would take an emulator many hours."""
    python = environments.python(environments.VLLM, lambda text: print(f"ktmoe: {text}", flush=True))
    # as tools/test_engines.py has them, but hours for each of the tests' processes
    variables = f"PYTHONPATH={ROOT} HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1 KTMOE_TEST_PATIENCE=7200"
    pytest = f"{variables} {python} -m pytest -q -p no:cacheprovider --exhaustive"
    quantized = "tests/vllm/test_quantized_layers.py tests/vllm/test_whole_models.py"
    return f"{pytest} {quantized} && KTMOE_VLLM_DENSE=all {pytest} tests/vllm/test_models.py::test_text"


def install() -> None:
    lacking = [package for package, program in PACKAGES.items() if not shutil.which(program)]
    if lacking and os.geteuid():
        raise Missing(f"only root can install {', '.join(lacking)}")
    if (lacking or not kernels()) and not shutil.which("apt-get"):
        raise Missing("QEMU and a kernel are taken from Debian's packages, and there is no apt-get")
    if lacking:
        print(f"ktmoe: installing {', '.join(lacking)}", flush=True)
        quietly("apt-get update && apt-get install -y --no-install-recommends " + " ".join(lacking))
    if not kernels():
        # this package only depends on the newest kernel's, whose name has its version
        found = re.search(r"Depends: (linux-image-\d\S+)", quietly("apt-cache depends linux-image-amd64"))
        if not found:
            raise Missing("apt-cache knows no kernel for linux-image-amd64: is this Debian, and was apt-get update run?")
        print(f"ktmoe: fetching {found[1]}", flush=True)
        FOLDER.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER.parent) as name:
            quietly(f"apt-get download -o APT::Sandbox::User=root {found[1]}", name)
            patterns = " ".join(f"'{pattern}'" for pattern in TAKEN)
            quietly(f"dpkg-deb --fsys-tarfile *.deb | tar x --wildcards --one-top-level=guest {patterns}", name)
            (Path(name) / "guest").rename(FOLDER)


def kernels() -> list[Path]:
    return sorted(FOLDER.glob("boot/vmlinuz-*"))


def quietly(command: str, folder: Path | str = ROOT) -> str:
    """What it prints. Raises Missing with the last line of a failure."""
    done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Missing(f"{command} failed: {''.join(done.stderr.strip().splitlines()[-1:])}")
    return done.stdout


def accelerator() -> str:
    # Where the CPU runs guests, one of these modules is loaded. kvm_pvm, which some virtual machines have, opens /dev/kvm
    # too, but a kernel of Debian's does not start on it.
    modules = [Path("/sys/module/kvm_intel"), Path("/sys/module/kvm_amd")]
    if os.access("/dev/kvm", os.R_OK | os.W_OK) and any(module.exists() for module in modules):
        return "kvm"
    print("ktmoe: this machine's KVM runs no such guest, so it is emulated, some 20 times slower", flush=True)
    return "tcg,thread=multi"


def run(command: str) -> int:
    """The exit code of a command in a guest, whose output is this process's."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        initramfs(folder, command)
        subprocess.run(qemu(folder, accelerator()), stdin=subprocess.DEVNULL, check=False)
        code = (folder / "code").read_text().strip() if (folder / "code").exists() else ""
        if not code:
            print("ktmoe: the guest ended before its command did. Its kernel said last:", flush=True)
            print("\n".join((folder / "kernel").read_text(errors="replace").splitlines()[-20:]), flush=True)
    return int(code or 1)


def qemu(folder: Path, accelerator: str, cpus: int = 2, memory: str = "10G", more: tuple[str, ...] = ()) -> list[str]:
    """The command that runs a guest. more: arguments for other guests than this one, such as its NUMA nodes."""
    shared = "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap"
    return [
        *("qemu-system-x86_64", "-nodefaults", "-no-reboot", "-display", "none"),
        *("-machine", "q35", "-accel", accelerator, "-cpu", CPU, "-smp", str(cpus), "-m", memory),
        *("-kernel", str(kernels()[-1]), "-initrd", str(folder / "initramfs")),
        *("-append", "console=ttyS0 panic=-1 mitigations=off"),  # two page tables would slow an emulator down
        *("-virtfs", shared, "-serial", f"file:{folder / 'kernel'}", "-serial", "stdio", "-serial", f"file:{folder / 'code'}"),
        *more,
    ]


def initramfs(folder: Path, command: str) -> None:
    """Write the guest's first file system: it mounts this machine's files and runs the command there."""
    tree = folder / "tree"
    for made in ("bin", "proc", "dev", "host", "written", "tree"):
        (tree / made).mkdir(parents=True)
    shutil.copy(str(shutil.which("busybox")), tree / "bin" / "busybox")
    shutil.copytree(FOLDER / "lib", tree / "lib")
    (tree / "command").write_text(f"export PATH='{os.environ['PATH']}' HOME=/tmp TMPDIR=/tmp\ncd '{ROOT}'\n{command}\n")
    (tree / "init").write_text(INIT)
    (tree / "init").chmod(0o755)
    version = kernels()[-1].name.removeprefix("vmlinuz-")
    quietly(f"depmod -b {tree} {version} && cd {tree} && find . | busybox cpio -o -H newc >{folder / 'initramfs'}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
