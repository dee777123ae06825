/* LD_PRELOAD shim of the fault campaign: counts, fails, logs or kills at system calls on files under one folder.

   It does nothing until `campaign_arm` is called in the process (by ctypes, in a forked child that is about to run a
   command). Then every call on a path under `root` is counted. The n-th call of the chosen kind returns an error, is
   shortened, or kills the process. With a log folder, every operation that changes names or makes data durable is
   recorded, and fsync stores a copy of the file: tests/campaign/power_cut_model.py computes from that what a power cut
   may leave. Counters are in shared memory, so that forked workers of the command count together. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

enum { OPEN, READ, WRITE, FSYNC, RENAME, MKDIR, UNLINK, MMAP, LINK, TRUNCATE, LOCK, STAT, KINDS };
enum { NOTHING, FAIL, FAIL_FROM, SHORTEN, KILL_BEFORE, KILL_AFTER };

struct shared { long count[KINDS]; long events; };

static struct shared *shared;
static char root[PATH_MAX], log_folder[PATH_MAX];
static size_t root_length;
static int armed, kind_at, action, error_number, log_fd = -1;
static long at_call;
static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;

/* kind: which calls to disturb (-1: none). n: the number of the call, from 0. For kills with kind KINDS, n counts the
   events of the log. */
void campaign_arm(const char *folder, int kind, long n, int what, int number, const char *log) {
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    memset(shared, 0, sizeof *shared);
    snprintf(root, sizeof root, "%s", folder);
    root_length = strlen(root);
    kind_at = kind, at_call = n, action = what, error_number = number;
    if (log && *log) {
        char name[PATH_MAX + 16];
        snprintf(log_folder, sizeof log_folder, "%s", log);
        snprintf(name, sizeof name, "%s/events", log);
        log_fd = (int)syscall(SYS_openat, AT_FDCWD, name, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    }
    armed = 1;
}

void campaign_counts(long *result) { memcpy(result, shared->count, sizeof shared->count); }

/* The counters of a process that may be killed: a file that is mapped instead of anonymous memory. */
void campaign_share(const char *file) {
    int fd = (int)syscall(SYS_openat, AT_FDCWD, file, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || syscall(SYS_ftruncate, fd, sizeof *shared)) return;
    void *mapped = (void *)syscall(SYS_mmap, NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped != MAP_FAILED) memset(mapped, 0, sizeof *shared), shared = mapped;
    syscall(SYS_close, fd);
}

static int under(const char *path) {
    return path && !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

static int absolute(int folder, const char *path, char *result) {
    char at[64], base[PATH_MAX];
    if (!path) return 0;
    if (*path == '/') return snprintf(result, PATH_MAX, "%s", path) < PATH_MAX;
    if (folder == AT_FDCWD) snprintf(at, sizeof at, "/proc/self/cwd");
    else snprintf(at, sizeof at, "/proc/self/fd/%d", folder);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, at, base, sizeof base - 1);
    if (length <= 0) return 0;
    base[length] = 0;
    return snprintf(result, PATH_MAX, "%s/%s", base, path) < PATH_MAX;
}

static int ours(int folder, const char *path, char *result) {
    return armed && absolute(folder, path, result) && under(result);
}

static int ours_fd(int fd, char *result) {
    char at[64];
    if (!armed || fd < 0) return 0;
    snprintf(at, sizeof at, "/proc/self/fd/%d", fd);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, at, result, PATH_MAX - 1);
    if (length <= 0) return 0;
    result[length] = 0;
    return under(result);
}

static void die(void) {
    syscall(SYS_kill, 0, SIGKILL); /* the group: the command and its workers */
    for (;;) pause();
}

/* Count a call. Returns the action for it; KILL_BEFORE does not return. */
static int disturb(int kind) {
    long n = __atomic_fetch_add(&shared->count[kind], 1, __ATOMIC_SEQ_CST);
    if (kind != kind_at || n < at_call || (n > at_call && action != FAIL_FROM)) return NOTHING;
    if (action == KILL_BEFORE) die();
    if (action == FAIL || action == FAIL_FROM) errno = error_number;
    return action;
}

/* Append an event: number, operation, inode, path and second path, separated by tabs. Paths of the campaign have none. */
static long record(const char *operation, unsigned long inode, const char *path, const char *second) {
    if (log_fd < 0) return -1;
    char line[2 * PATH_MAX + 128];
    pthread_mutex_lock(&log_lock);
    long n = __atomic_fetch_add(&shared->events, 1, __ATOMIC_SEQ_CST);
    int length = snprintf(line, sizeof line, "%ld\t%s\t%lu\t%s\t%s\n", n, operation, inode, path, second);
    syscall(SYS_write, log_fd, line, (size_t)length);
    pthread_mutex_unlock(&log_lock);
    return n;
}

static void after_event(long n) {
    if (n >= 0 && kind_at == KINDS && n == at_call) die();
}

static unsigned long inode_of(const char *path) {
    struct stat s;
    return syscall(SYS_newfstatat, AT_FDCWD, path, &s, AT_SYMLINK_NOFOLLOW) ? 0 : (unsigned long)s.st_ino;
}

/* Copy a file into the log: its content is durable from here on. */
static void snapshot(int fd, long n) {
    char name[PATH_MAX + 32], at[64];
    char buffer[1 << 16];
    ssize_t length;
    snprintf(name, sizeof name, "%s/%ld", log_folder, n);
    snprintf(at, sizeof at, "/proc/self/fd/%d", fd);
    int from = (int)syscall(SYS_openat, AT_FDCWD, at, O_RDONLY | O_CLOEXEC, 0);
    int to = (int)syscall(SYS_openat, AT_FDCWD, name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    while (from >= 0 && to >= 0 && (length = syscall(SYS_read, from, buffer, sizeof buffer)) > 0)
        syscall(SYS_write, to, buffer, (size_t)length);
    if (from >= 0) syscall(SYS_close, from);
    if (to >= 0) syscall(SYS_close, to);
}

#define REAL(name) ((__typeof__(&name))real(#name))
static void *real(const char *name) {
    void *found = dlsym(RTLD_NEXT, name);
    if (!found) abort();
    return found;
}

#define DISTURBED(kind, failed)                                        \
    int what = disturb(kind);                                          \
    if (what == FAIL || what == FAIL_FROM) return failed
#define DONE(event)                                                    \
    do {                                                               \
        int saved = errno;                                             \
        after_event(event);                                            \
        if (what == KILL_AFTER) die();                                 \
        errno = saved;                                                 \
    } while (0)

static int open_in(int folder, const char *path, int flags, mode_t mode) {
    char full[PATH_MAX];
    if (!ours(folder, path, full) || (flags & O_PATH)) return (int)syscall(SYS_openat, folder, path, flags, mode);
    DISTURBED(OPEN, -1);
    int created = (flags & O_CREAT) && !inode_of(full);
    int cut = (flags & O_TRUNC) && !created;
    int fd = (int)syscall(SYS_openat, folder, path, flags, mode);
    long event = -1;
    if (fd >= 0 && (created || cut)) event = record(created ? "create" : "truncate", inode_of(full), full, "");
    DONE(event);
    return fd;
}

#define MODE_OF(flags)                                                 \
    mode_t mode = 0;                                                   \
    if ((flags) & (O_CREAT | O_TMPFILE)) {                             \
        va_list list;                                                  \
        va_start(list, flags);                                         \
        mode = (mode_t)va_arg(list, int);                              \
        va_end(list);                                                  \
    }

int open(const char *path, int flags, ...) { MODE_OF(flags) return open_in(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE_OF(flags) return open_in(AT_FDCWD, path, flags, mode); }
int openat(int folder, const char *path, int flags, ...) { MODE_OF(flags) return open_in(folder, path, flags, mode); }
int openat64(int folder, const char *path, int flags, ...) { MODE_OF(flags) return open_in(folder, path, flags, mode); }

static FILE *open_stream(const char *name, const char *path, const char *mode) {
    char full[PATH_MAX];
    FILE *(*function)(const char *, const char *) = (FILE * (*)(const char *, const char *)) real(name);
    if (!ours(AT_FDCWD, path, full)) return function(path, mode);
    DISTURBED(OPEN, NULL);
    int created = strpbrk(mode, "wa") && !inode_of(full);
    FILE *file = function(path, mode);
    long event = file && created ? record("create", inode_of(full), full, "") : -1;
    DONE(event);
    return file;
}

FILE *fopen(const char *path, const char *mode) { return open_stream("fopen", path, mode); }
FILE *fopen64(const char *path, const char *mode) { return open_stream("fopen64", path, mode); }

ssize_t read(int fd, void *data, size_t size) {
    char full[PATH_MAX];
    if (!ours_fd(fd, full)) return syscall(SYS_read, fd, data, size);
    DISTURBED(READ, -1);
    ssize_t result = syscall(SYS_read, fd, data, what == SHORTEN && size > 1 ? size / 2 : size);
    DONE(-1);
    return result;
}

ssize_t pread64(int fd, void *data, size_t size, off64_t offset) {
    char full[PATH_MAX];
    if (!ours_fd(fd, full)) return syscall(SYS_pread64, fd, data, size, offset);
    DISTURBED(READ, -1);
    ssize_t result = syscall(SYS_pread64, fd, data, what == SHORTEN && size > 1 ? size / 2 : size, offset);
    DONE(-1);
    return result;
}
ssize_t pread(int fd, void *data, size_t size, off_t offset) { return pread64(fd, data, size, offset); }

ssize_t write(int fd, const void *data, size_t size) {
    char full[PATH_MAX];
    if (!ours_fd(fd, full)) return syscall(SYS_write, fd, data, size);
    DISTURBED(WRITE, -1);
    ssize_t result = syscall(SYS_write, fd, data, what == SHORTEN && size > 1 ? size / 2 : size);
    DONE(record("write", inode_of(full), full, ""));
    return result;
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
    char full[PATH_MAX];
    if (!ours_fd(fd, full)) return syscall(SYS_pwrite64, fd, data, size, offset);
    DISTURBED(WRITE, -1);
    ssize_t result = syscall(SYS_pwrite64, fd, data, what == SHORTEN && size > 1 ? size / 2 : size, offset);
    DONE(record("write", inode_of(full), full, ""));
    return result;
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) { return pwrite64(fd, data, size, offset); }

static int synced(int fd, long call) {
    char full[PATH_MAX];
    struct stat s;
    if (!ours_fd(fd, full)) return (int)syscall(call, fd);
    DISTURBED(FSYNC, -1);
    long event = -1;
    if (!syscall(SYS_fstat, fd, &s) && log_fd >= 0) {
        int folder = S_ISDIR(s.st_mode);
        event = record(folder ? "sync_folder" : "sync", (unsigned long)s.st_ino, full, "");
        if (!folder) snapshot(fd, event);
    }
    DONE(event); /* the real call is not needed: the machine stays up */
    return 0;
}
int fsync(int fd) { return synced(fd, SYS_fsync); }
int fdatasync(int fd) { return synced(fd, SYS_fdatasync); }

static int renamed(int from, const char *old, int to, const char *new, unsigned flags) {
    char first[PATH_MAX], second[PATH_MAX];
    if (!ours(from, old, first) || !ours(to, new, second))
        return (int)syscall(SYS_renameat2, from, old, to, new, flags);
    DISTURBED(RENAME, -1);
    unsigned long inode = inode_of(first);
    int result = (int)syscall(SYS_renameat2, from, old, to, new, flags);
    DONE(result ? -1 : record(flags & 2 ? "exchange" : "rename", inode, first, second));
    return result;
}
int rename(const char *old, const char *new) { return renamed(AT_FDCWD, old, AT_FDCWD, new, 0); }
int renameat(int from, const char *old, int to, const char *new) { return renamed(from, old, to, new, 0); }
int renameat2(int from, const char *old, int to, const char *new, unsigned flags) {
    return renamed(from, old, to, new, flags);
}

static int linked(int from, const char *old, int to, const char *new, int flags) {
    char first[PATH_MAX], second[PATH_MAX];
    if (!ours(from, old, first) || !ours(to, new, second)) return (int)syscall(SYS_linkat, from, old, to, new, flags);
    DISTURBED(LINK, -1);
    int result = (int)syscall(SYS_linkat, from, old, to, new, flags);
    DONE(result ? -1 : record("link", inode_of(first), first, second));
    return result;
}
int link(const char *old, const char *new) { return linked(AT_FDCWD, old, AT_FDCWD, new, 0); }
int linkat(int from, const char *old, int to, const char *new, int flags) { return linked(from, old, to, new, flags); }

static int made(int folder, const char *path, mode_t mode) {
    char full[PATH_MAX];
    if (!ours(folder, path, full)) return (int)syscall(SYS_mkdirat, folder, path, mode);
    DISTURBED(MKDIR, -1);
    int result = (int)syscall(SYS_mkdirat, folder, path, mode);
    DONE(result ? -1 : record("mkdir", inode_of(full), full, ""));
    return result;
}
int mkdir(const char *path, mode_t mode) { return made(AT_FDCWD, path, mode); }
int mkdirat(int folder, const char *path, mode_t mode) { return made(folder, path, mode); }

static int removed(int folder, const char *path, int flags) {
    char full[PATH_MAX];
    if (!ours(folder, path, full)) return (int)syscall(SYS_unlinkat, folder, path, flags);
    DISTURBED(UNLINK, -1);
    int result = (int)syscall(SYS_unlinkat, folder, path, flags);
    DONE(result ? -1 : record(flags & AT_REMOVEDIR ? "rmdir" : "unlink", 0, full, ""));
    return result;
}
int unlink(const char *path) { return removed(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return removed(AT_FDCWD, path, AT_REMOVEDIR); }
int unlinkat(int folder, const char *path, int flags) { return removed(folder, path, flags); }

void *mmap64(void *address, size_t size, int protection, int flags, int fd, off64_t offset) {
    char full[PATH_MAX];
    if (fd < 0 || !ours_fd(fd, full))
        return (void *)syscall(SYS_mmap, address, size, protection, flags, fd, offset);
    DISTURBED(MMAP, MAP_FAILED);
    void *result = (void *)syscall(SYS_mmap, address, size, protection, flags, fd, offset);
    DONE(-1);
    return result;
}
void *mmap(void *address, size_t size, int protection, int flags, int fd, off_t offset) {
    return mmap64(address, size, protection, flags, fd, offset);
}

int ftruncate64(int fd, off64_t size) {
    char full[PATH_MAX];
    if (!ours_fd(fd, full)) return (int)syscall(SYS_ftruncate, fd, size);
    DISTURBED(TRUNCATE, -1);
    int result = (int)syscall(SYS_ftruncate, fd, size);
    DONE(record("write", inode_of(full), full, ""));
    return result;
}
int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }

int flock(int fd, int operation) {
    char full[PATH_MAX];
    if (!ours_fd(fd, full)) return (int)syscall(SYS_flock, fd, operation);
    DISTURBED(LOCK, -1);
    return (int)syscall(SYS_flock, fd, operation);
}

#define STATS(name, type, ...)                                                             \
    int name(const char *path, struct type *result) {                                      \
        char full[PATH_MAX];                                                               \
        if (!ours(AT_FDCWD, path, full)) return REAL(name)(path, result);                  \
        DISTURBED(STAT, -1);                                                               \
        return REAL(name)(path, result);                                                   \
    }
STATS(stat, stat)
STATS(lstat, stat)
STATS(stat64, stat64)
STATS(lstat64, stat64)
