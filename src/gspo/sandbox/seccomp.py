"""The system calls that a program in the sandbox may make, as a filter that bubblewrap installs."""

import ctypes
import errno
import mmap
import os
import signal
import socket
import termios
from functools import cache

from gspo.errors import UserError

# What ordinary programs, Python's and C++'s standard libraries and numpy need. Any other call answers ENOSYS, as on a
# kernel that does not have it: so glibc falls back from clone3 to clone, whose flags can be looked at, and a call that
# a later kernel brings is denied until it is named here. What could reach another process (ptrace, pidfd_getfd,
# setpriority, sched_setscheduler …) or keep memory that nobody counts (memfd, System V, xattrs, epoll, sendfile: Python
# does without the last two by itself) is not among them.
_ALLOWED = """
read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 open openat openat2 creat close close_range
stat fstat lstat newfstatat fstatat64 statx statfs fstatfs lseek access faccessat faccessat2 dup dup2 dup3
fsync fdatasync truncate ftruncate fallocate getdents getdents64 getcwd chdir fchdir rename renameat renameat2 mkdir
mkdirat rmdir link linkat unlink unlinkat symlink symlinkat readlink readlinkat chmod fchmod fchmodat fchmodat2 mknod
mknodat umask utime utimes utimensat futimesat copy_file_range fadvise64 getxattr lgetxattr
fgetxattr listxattr llistxattr flistxattr
pipe pipe2 poll ppoll select pselect6 eventfd eventfd2 timerfd_create timerfd_settime timerfd_gettime signalfd signalfd4
munmap mremap mprotect madvise msync mincore brk membarrier rseq
fork vfork execve exit exit_group wait4 waitid kill tkill tgkill pidfd_open getpid getppid gettid getpgid setpgid
getpgrp getsid setsid getuid geteuid getgid getegid getgroups getresuid getresgid getpriority arch_prctl
set_tid_address set_robust_list futex futex_waitv sched_yield sched_getaffinity sched_getparam sched_getscheduler
sched_get_priority_max sched_get_priority_min restart_syscall getrlimit setrlimit getrusage times uname sysinfo getcpu
getrandom
rt_sigprocmask rt_sigpending rt_sigtimedwait rt_sigqueueinfo rt_sigsuspend rt_sigreturn sigaltstack pause
alarm getitimer setitimer timer_create timer_settime timer_gettime timer_getoverrun timer_delete time gettimeofday
clock_gettime clock_getres nanosleep clock_nanosleep
connect bind listen accept accept4 getsockname getpeername sendto recvfrom sendmsg recvmsg sendmmsg recvmmsg shutdown
getsockopt
"""
_NEW_NAMESPACES = 0x7E02_0000  # every CLONE_NEW… flag that clone itself takes
# The parent's death signal, dumpable (read, set), the thread's name (set, read), adopt orphans.
_PRCTL = [1, 3, 4, 15, 16, 36]
# Duplicates, flags, the size of a pipe (read): not to set it, and no locks of a file's parts, of any number.
_FCNTL = [0, 1, 2, 3, 4, 1030, 1032]
_IOCTL = [
    *(termios.FIONREAD, termios.FIONBIO, termios.FIOCLEX, termios.FIONCLEX),
    *(termios.TCGETS, termios.TIOCGWINSZ, termios.TIOCGPGRP),
]
_ALLOW, _ANSWER_ENOSYS = 0x7FFF_0000, 0x0005_0000 | errno.ENOSYS
_MASKED_EQUAL, _WHOLE, _LOWER = 7, 2**64 - 1, 2**32 - 1
_UNKNOWN = -1  # the number that libseccomp gives to a name it does not know


class _Comparison(ctypes.Structure):
    """scmp_arg_cmp of seccomp.h: which argument, how it is compared, under which mask, with what."""

    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


# Calls that are allowed only where this argument, under this mask, is this value.
_RESTRICTED = [
    ("clone", 0, _NEW_NAMESPACES, 0),
    ("prlimit64", 0, _WHOLE, 0),  # of itself: it could end the harness by a limit of its
    ("sched_setaffinity", 0, _WHOLE, 0),  # of itself
    ("socket", 0, _WHOLE, socket.AF_UNIX),
    ("socketpair", 0, _WHOLE, socket.AF_UNIX),
    ("setsockopt", 2, _LOWER, socket.SO_REUSEADDR),  # not the size of a buffer
    # Memory of no file that processes share stays when none has it mapped, and then no process is charged for it.
    *(("mmap", 3, kind, 0) for kind in (mmap.MAP_SHARED, mmap.MAP_ANONYMOUS)),
    # The CPU time of children whose SIGCHLD is ignored is in no process's once they have ended.
    *(("rt_sigaction", 0, _WHOLE, number) for number in range(1, 65) if number != signal.SIGCHLD),
    *(("fcntl", 1, _LOWER, command) for command in _FCNTL),
    *(("prctl", 0, _WHOLE, option) for option in _PRCTL),
    *(("ioctl", 1, _LOWER, request) for request in _IOCTL),
]


@cache
def compile_filter() -> bytes:
    """The filter as a program of the kernel's; UserError where libseccomp, which writes it, is not installed."""
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError as error:
        fix = "install it: apt install libseccomp2 (Debian, Ubuntu), dnf install libseccomp (Fedora)"
        raise UserError(f"code cannot be isolated: libseccomp is missing ({error})", fix=fix) from None
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(_ANSWER_ENOSYS))
    try:
        for name, argument, mask, value in [*((name, 0, 0, 0) for name in _ALLOWED.split()), *_RESTRICTED]:
            number = library.seccomp_syscall_resolve_name(name.encode())
            if number == _UNKNOWN:  # to an older libseccomp: then it stays denied
                continue
            comparison = ctypes.byref(_Comparison(argument, _MASKED_EQUAL, mask, value))
            if status := library.seccomp_rule_add_array(context, _ALLOW, number, int(mask > 0), comparison):
                raise RuntimeError(f"seccomp_rule_add_array({name}): {os.strerror(-status)}")
        with os.fdopen(os.memfd_create("filter"), "r+b") as file:
            if status := library.seccomp_export_bpf(context, file.fileno()):
                raise RuntimeError(f"seccomp_export_bpf: {os.strerror(-status)}")
            file.seek(0)
            return file.read()
    finally:
        library.seccomp_release(context)
