/* Calls on files below one folder, by name or by a descriptor that was opened there. See failing.h. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

#include "failing.h"

enum { DESCRIPTORS = 1 << 16 };
static _Atomic char ours[DESCRIPTORS]; /* READ_ONLY or WRITABLE */
enum { READ_ONLY = 1, WRITABLE };
static char folder[PATH_MAX];

/* Files below this folder are meant, an absolute path. */
void failing_folder(const char *path) { snprintf(folder, sizeof folder, "%s/", path); }

static bool is_ours(int fd) { return fd >= 0 && fd < DESCRIPTORS && ours[fd]; }

static bool below(int at, const char *path) {
    int fd;
    if (!folder[0] || !path) return false;
    if (sscanf(path, "/proc/self/fd/%d", &fd) == 1) return is_ours(fd);
    return path[0] == '/' ? !strncmp(path, folder, strlen(folder)) : is_ours(at);
}

/* Whether the call is not to be made. */
static bool refused(bool concerned, enum kind kind, const char *name) {
    const enum how how = concerned ? failing_now(kind, name) : NOTHING;
    if (how == KILL) failing_die();
    if (how == FAIL) errno = failing_error();
    return how == FAIL;
}

#define ALIAS(name) __attribute__((alias(name)))

static int opened(int at, const char *path, int flags, mode_t mode, const char *name) {
    const bool concerned = below(at, path);
    if (refused(concerned, OPEN, name)) return -1;
    const int fd = NEXT(openat)(at, path, flags, mode);
    const bool writes = (flags & O_ACCMODE) != O_RDONLY;
    if (fd >= 0 && fd < DESCRIPTORS) ours[fd] = !concerned ? 0 : writes ? WRITABLE : READ_ONLY;
    return fd;
}

static mode_t mode_in(va_list list, int flags) { return flags & (O_CREAT | O_TMPFILE) ? va_arg(list, mode_t) : 0; }

int open(const char *path, int flags, ...) {
    va_list list;
    va_start(list, flags);
    const mode_t mode = mode_in(list, flags);
    va_end(list);
    return opened(AT_FDCWD, path, flags, mode, "open");
}
int open64(const char *, int, ...) ALIAS("open");

int openat(int at, const char *path, int flags, ...) {
    va_list list;
    va_start(list, flags);
    const mode_t mode = mode_in(list, flags);
    va_end(list);
    return opened(at, path, flags, mode, "openat");
}
int openat64(int, const char *, int, ...) ALIAS("openat");

int close(int fd) {
    /* It fails where a remote disk refuses at last what was written. */
    const bool fails = refused(is_ours(fd) && ours[fd] == WRITABLE, CLOSE, "close");
    if (fd >= 0 && fd < DESCRIPTORS) ours[fd] = false;
    const int result = NEXT(close)(fd); /* Linux closes it in any case */
    if (fails) errno = failing_error();
    return fails ? -1 : result;
}

/* Bytes of a transfer that is made: fewer, and what is more than an int is an error. kill: after it. */
static bool transfer(int fd, enum kind kind, const char *name, size_t *bytes, bool *kill) {
    const enum how how = is_ours(fd) ? failing_now(kind, name) : NOTHING;
    *kill = how == KILL;
    if (how == KILL && kind == READ) failing_die();
    if ((how == FEWER || how == KILL) && *bytes > 1) *bytes /= 2;
    if (how == FAIL) errno = failing_error();
    return how != FAIL;
}

ssize_t read(int fd, void *to, size_t bytes) {
    bool kill;
    return transfer(fd, READ, "read", &bytes, &kill) ? NEXT(read)(fd, to, bytes) : -1;
}

ssize_t write(int fd, const void *from, size_t bytes) {
    bool kill;
    if (!transfer(fd, WRITE, "write", &bytes, &kill)) return -1;
    const ssize_t result = NEXT(write)(fd, from, bytes);
    if (kill) failing_die();
    return result;
}

/* Python reads into one buffer at a time. */
ssize_t preadv2(int fd, const struct iovec *to, int count, off_t offset, int flags) {
    struct iovec one = *to;
    bool kill;
    if (!transfer(fd, READ, "preadv", &one.iov_len, &kill)) return -1;
    return NEXT(preadv2)(fd, count == 1 ? &one : to, count, offset, flags);
}
ssize_t preadv64v2(int, const struct iovec *, int, off_t, int) ALIAS("preadv2");
ssize_t preadv(int fd, const struct iovec *to, int count, off_t offset) { return preadv2(fd, to, count, offset, 0); }
ssize_t preadv64(int, const struct iovec *, int, off_t) ALIAS("preadv");

int fsync(int fd) { return refused(is_ours(fd), SYNC, "fsync") ? -1 : NEXT(fsync)(fd); }

int ftruncate(int fd, off_t bytes) { return refused(is_ours(fd), TRUNCATE, "ftruncate") ? -1 : NEXT(ftruncate)(fd, bytes); }
int ftruncate64(int, off_t) ALIAS("ftruncate");

int flock(int fd, int operation) { return refused(is_ours(fd), LOCK, "flock") ? -1 : NEXT(flock)(fd, operation); }

int rename(const char *from, const char *to) {
    return refused(below(AT_FDCWD, to), NAME, "rename") ? -1 : NEXT(rename)(from, to);
}

int unlink(const char *path) { return refused(below(AT_FDCWD, path), NAME, "unlink") ? -1 : NEXT(unlink)(path); }

int rmdir(const char *path) { return refused(below(AT_FDCWD, path), NAME, "rmdir") ? -1 : NEXT(rmdir)(path); }

int mkdir(const char *path, mode_t mode) {
    return refused(below(AT_FDCWD, path), NAME, "mkdir") ? -1 : NEXT(mkdir)(path, mode);
}

int stat(const char *path, struct stat *to) {
    return refused(below(AT_FDCWD, path), STATUS, "stat") ? -1 : NEXT(fstatat)(AT_FDCWD, path, to, 0);
}
int stat64(const char *, struct stat64 *) ALIAS("stat");

int lstat(const char *path, struct stat *to) {
    return refused(below(AT_FDCWD, path), STATUS, "lstat") ? -1 : NEXT(fstatat)(AT_FDCWD, path, to, AT_SYMLINK_NOFOLLOW);
}
int lstat64(const char *, struct stat64 *) ALIAS("lstat");

int fstat(int fd, struct stat *to) {
    return refused(is_ours(fd), STATUS, "fstat") ? -1 : NEXT(fstatat)(fd, "", to, AT_EMPTY_PATH);
}
int fstat64(int, struct stat64 *) ALIAS("fstat");

int statvfs(const char *path, struct statvfs *to) {
    return refused(below(AT_FDCWD, path), STATUS, "statvfs") ? -1 : NEXT(statvfs)(path, to);
}
int statvfs64(const char *, struct statvfs64 *) ALIAS("statvfs");

DIR *opendir(const char *path) { return refused(below(AT_FDCWD, path), LIST, "opendir") ? NULL : NEXT(opendir)(path); }
