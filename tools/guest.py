"""What boots a guest: QEMU, a kernel of Debian's and this machine's files. The other *_guest.py say what runs in one.

What a guest writes stays in its memory. It has no network, unless a tool gives it one.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Where the kernel and its modules are kept.
FOLDER = ROOT / "build" / "guest"
#: Debian's packages, and the program that is needed of each.
PACKAGES = {"qemu-system-x86": "qemu-system-x86_64", "busybox-static": "busybox", "kmod": "depmod"}
#: What is taken of the kernel's package, which is 400 MB: for this machine's files, a disk in memory, a network.
DRIVERS = (
    *("net/9p/*", "fs/9p/*", "fs/netfs/*", "fs/fscache/*", "fs/overlayfs/*", "drivers/virtio/*"),
    *("fs/ext4/*", "fs/jbd2/*", "fs/mbcache.ko", "lib/crc16.ko", "crypto/crc32c*.ko", "drivers/block/loop.ko"),
    *("drivers/net/virtio_net.ko", "drivers/net/net_failover.ko", "net/core/failover.ko", "net/sched/sch_netem.ko"),
)
TAKEN = ("./boot/vmlinuz-*", "*/modules.order", "*/modules.builtin*", *(f"*/kernel/{driver}" for driver in DRIVERS))
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
for module in $MODULES; do modprobe $module; done
cp /command /tree/command
chroot /tree /bin/sh /command </dev/null >/dev/ttyS1 2>&1
echo $? >/dev/ttyS2
poweroff -f
"""


class Missing(Exception):
    """What a guest needs cannot be had here."""


def attempt(work: Callable[[], int], *more: type[Exception]) -> int:
    """What work() returns, or 0 where what it needs cannot be had. more: exceptions that say so, besides Missing."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # or QEMU would outlive this process
    try:
        return work()
    except (Missing, *more) as error:
        print(f"ktmoe: nothing ran in a guest: {error}", flush=True)
        return 0


def install(more: Mapping[str, str] | None = None) -> None:
    """Have QEMU and a kernel. more: what else is needed, as PACKAGES has it. Raises Missing."""
    lacking = [package for package, program in (PACKAGES | dict(more or {})).items() if not shutil.which(program)]
    if lacking and os.geteuid():
        raise Missing(f"only root can install {', '.join(lacking)}")
    if (lacking or not fetched()) and not shutil.which("apt-get"):
        raise Missing("QEMU and a kernel are taken from Debian's packages, and there is no apt-get")
    if lacking:
        print(f"ktmoe: installing {', '.join(lacking)}", flush=True)
        quietly("apt-get update && apt-get install -y --no-install-recommends " + " ".join(lacking))
    if not fetched():
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
            (Path(name) / "guest" / "taken").write_text("\n".join(TAKEN))
            shutil.rmtree(FOLDER, ignore_errors=True)
            (Path(name) / "guest").rename(FOLDER)


def kernels() -> list[Path]:
    return sorted(FOLDER.glob("boot/vmlinuz-*"))


def fetched() -> bool:
    """Whether a kernel is there, with all drivers that guests have by now."""
    taken = FOLDER / "taken"
    return bool(kernels()) and taken.exists() and taken.read_text() == "\n".join(TAKEN)


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


def run(command: str, arguments: Sequence[str] = ("-smp", "2", "-m", "10G"), modules: Sequence[str] = ()) -> int:
    """The exit code of a command in a guest, whose output is this process's.

    arguments: QEMU's, of the guest's CPUs and memory. modules: of the kernel, besides those that every guest has.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        initramfs(folder, command, modules)
        subprocess.run(qemu(folder, accelerator(), arguments), stdin=subprocess.DEVNULL, check=False)
        return code_of(folder)


def code_of(folder: Path) -> int:
    """The exit code of the command of a guest that has ended."""
    code = (folder / "code").read_text().strip() if (folder / "code").exists() else ""
    if not code:
        print("ktmoe: the guest ended before its command did. Its kernel said last:", flush=True)
        print("\n".join((folder / "kernel").read_text(errors="replace").splitlines()[-20:]), flush=True)
    return int(code or 1)


def qemu(folder: Path, accelerator: str, arguments: Sequence[str]) -> list[str]:
    """The command that runs a guest, whose first file system is in the folder."""
    shared = "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap"
    return [
        *("qemu-system-x86_64", "-nodefaults", "-no-reboot", "-display", "none"),
        *("-machine", "q35", "-accel", accelerator, "-cpu", CPU),
        *("-kernel", str(kernels()[-1]), "-initrd", str(folder / "initramfs")),
        *("-append", "console=ttyS0 panic=-1 mitigations=off"),  # two page tables would slow an emulator down
        # without vectors, QEMU 7.2 has no table of them, in which the emulator now and then failed an assertion
        *("-fsdev", shared, "-device", "virtio-9p-pci,fsdev=host,mount_tag=host,vectors=0"),
        *("-serial", f"file:{folder / 'kernel'}", "-serial", "stdio", "-serial", f"file:{folder / 'code'}"),
        *arguments,
    ]


def initramfs(folder: Path, command: str, modules: Sequence[str]) -> None:
    """Write the guest's first file system: it mounts this machine's files and runs the command there."""
    tree = folder / "tree"
    for made in ("bin", "proc", "dev", "host", "written", "tree"):
        (tree / made).mkdir(parents=True)
    shutil.copy(str(shutil.which("busybox")), tree / "bin" / "busybox")
    shutil.copytree(FOLDER / "lib", tree / "lib")
    (tree / "command").write_text(f"export PATH='{os.environ['PATH']}' HOME=/tmp TMPDIR=/tmp\ncd '{ROOT}'\n{command}\n")
    (tree / "init").write_text(INIT.replace("$MODULES", " ".join(modules)))
    (tree / "init").chmod(0o755)
    version = kernels()[-1].name.removeprefix("vmlinuz-")
    quietly(f"depmod -b {tree} {version} && cd {tree} && find . | busybox cpio -o -H newc >{folder / 'initramfs'}")
