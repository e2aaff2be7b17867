/* Logs what a process does to the files of one folder, in the order in which it does it.
 *
 * LD_PRELOAD. POWER_CUT_FOLDER: the folder (canonical, flat). POWER_CUT_LOG: the log; records are described in
 * recorder.py. Call, log record and next call never overlap, so that the log has one order over all threads.
 * Which file a descriptor means is asked of /proc each time: no table that a dup or a fork could make wrong.
 *
 * A process may also ask for a slow disk (power_cut_slow), for a full one (power_cut_room), and leave a note in the
 * log (power_cut_mark). What the simulator cannot replay (a shared writable mapping, a hard link) is logged as 'X'.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))real(#name))

struct record {
    uint8_t op;
    uint8_t pad[3];
    uint32_t name_bytes;
    uint64_t inode;
    int64_t number;
    uint64_t data_bytes;
};

struct seen {
    int folder; /* the descriptor is the folder itself */
    uint64_t inode;
    int64_t size;
    char name[NAME_MAX + 1];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char folder[PATH_MAX];
static int log_fd = -1;
static int64_t room = -1; /* bytes that files may still grow by; -1: no limit */
static unsigned slow_us;

static void *real(const char *name) {
    void *f = dlsym(RTLD_NEXT, name);
    if (!f) {
        fprintf(stderr, "power_cut: no %s in the C library\n", name);
        abort();
    }
    return f;
}

__attribute__((constructor)) static void start(void) {
    const char *where = getenv("POWER_CUT_FOLDER"), *log = getenv("POWER_CUT_LOG");
    if (!where || !realpath(where, folder)) folder[0] = 0;
    if (!log) return;
    int fd = REAL(open)(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    log_fd = fcntl(fd, F_DUPFD_CLOEXEC, 900);
    REAL(close)(fd);
    if (log_fd < 0) abort();
}

static void put(const void *data, size_t n) {
    for (const char *p = data; n;) {
        ssize_t w = REAL(write)(log_fd, p, n);
        if (w < 0 && errno != EINTR) abort();
        if (w > 0) p += w, n -= w;
    }
}

static void note(char op, uint64_t inode, const char *name, int64_t number, const void *data, size_t n) {
    if (log_fd < 0) return;
    int kept = errno;
    struct record r = {op, {0}, strlen(name), inode, number, n};
    put(&r, sizeof r);
    put(name, r.name_bytes);
    put(data, n);
    errno = kept;
}

/* The name below the folder of a canonical path, NULL where it is elsewhere; "" for the folder itself. */
static const char *below(const char *path) {
    size_t n = strlen(folder);
    if (!n || strncmp(path, folder, n)) return NULL;
    if (!path[n]) return "";
    if (path[n] != '/') return NULL;
    if (strchr(path + n + 1, '/')) {
        note('X', 0, path, 0, "subfolder", 9);
        return NULL;
    }
    return path + n + 1;
}

static int see(int fd, struct seen *s) {
    char link[64], path[PATH_MAX];
    struct stat st;
    if (!folder[0] || fd == log_fd) return 0;
    int kept = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    int ok = n > 0 && fstat(fd, &st) == 0;
    errno = kept;
    if (!ok) return 0;
    path[n] = 0;
    const char *gone = " (deleted)";
    size_t g = strlen(gone);
    if (st.st_nlink == 0 && (size_t)n > g && !strcmp(path + n - g, gone)) path[n - g] = 0;
    const char *name = below(path);
    if (!name) return 0;
    s->folder = !name[0];
    s->inode = st.st_ino;
    s->size = st.st_size;
    snprintf(s->name, sizeof s->name, "%s", name);
    return 1;
}

/* Name below the folder of a path as a caller gives it, the last part of which need not exist; 0 where elsewhere. */
static int named(const char *path, char *name, uint64_t *inode) {
    char parent[PATH_MAX], whole[PATH_MAX], full[2 * PATH_MAX];
    struct stat st;
    if (!folder[0]) return 0;
    int kept = errno;
    snprintf(parent, sizeof parent, "%s", path);
    char *slash = strrchr(parent, '/');
    const char *last = slash ? path + (slash - parent) + 1 : path;
    if (slash) slash[slash == parent] = 0;
    int ok = realpath(slash ? parent : ".", whole) != NULL;
    *inode = lstat(path, &st) == 0 ? st.st_ino : 0;
    errno = kept;
    if (!ok) return 0;
    snprintf(full, sizeof full, "%s/%s", whole, last);
    const char *found = below(full);
    if (!found || !found[0]) return 0;
    snprintf(name, NAME_MAX + 1, "%s", found);
    return 1;
}

/* How many of n bytes at an offset the disk takes; 0: it is full. */
static size_t fits(const struct seen *s, int64_t offset, size_t n) {
    int64_t growth = offset + (int64_t)n - s->size;
    if (room < 0 || growth <= 0) return n;
    if (growth > room) n = growth - room >= (int64_t)n ? 0 : n - (size_t)(growth - room);
    growth = offset + (int64_t)n - s->size;
    if (n && growth > 0) room -= growth;
    return n;
}

static void frees(int64_t bytes) {
    if (room >= 0 && bytes > 0) room += bytes;
}

void power_cut_mark(const char *text) {
    pthread_mutex_lock(&lock);
    note('M', 0, text, 0, "", 0);
    pthread_mutex_unlock(&lock);
}

void power_cut_room(int64_t bytes) {
    pthread_mutex_lock(&lock);
    room = bytes;
    pthread_mutex_unlock(&lock);
}

void power_cut_slow(unsigned us_per_write) { slow_us = us_per_write; }

static int opened(int (*f)(int, const char *, int, ...), int at, const char *path, int flags, mode_t mode) {
    struct seen s;
    struct stat st;
    int kept = errno;
    pthread_mutex_lock(&lock);
    int was_there = fstatat(at, path, &st, 0) == 0;
    errno = kept;
    int fd = f(at, path, flags, mode);
    if (fd >= 0 && see(fd, &s) && !s.folder) {
        if ((flags & O_CREAT) && !was_there) note('O', s.inode, s.name, 0, "", 0);
        if ((flags & O_TRUNC) && was_there) frees(st.st_size), note('T', s.inode, s.name, 0, "", 0);
    }
    pthread_mutex_unlock(&lock);
    return fd;
}

#define MODE(flags) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | __O_TMPFILE)) { \
        va_list ap; \
        va_start(ap, flags); \
        mode = va_arg(ap, mode_t); \
        va_end(ap); \
    }

int open(const char *path, int flags, ...) { MODE(flags) return opened(REAL(openat), AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags) return opened(REAL(openat), AT_FDCWD, path, flags | O_LARGEFILE, mode); }
int openat(int at, const char *path, int flags, ...) { MODE(flags) return opened(REAL(openat), at, path, flags, mode); }
int openat64(int at, const char *path, int flags, ...) { MODE(flags) return opened(REAL(openat), at, path, flags | O_LARGEFILE, mode); }
int creat(const char *path, mode_t mode) { return opened(REAL(openat), AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

static ssize_t put_at(int fd, const void *data, size_t n, off_t offset) {
    struct seen s;
    if (!see(fd, &s)) return REAL(pwrite)(fd, data, n, offset);
    if (slow_us) usleep(slow_us);
    pthread_mutex_lock(&lock);
    ssize_t w = -1;
    see(fd, &s);
    size_t most = fits(&s, offset, n);
    if (n && !most) errno = ENOSPC;
    else w = REAL(pwrite)(fd, data, most, offset);
    if (w > 0) note('W', s.inode, s.name, offset, data, w);
    pthread_mutex_unlock(&lock);
    return w;
}

ssize_t pwrite(int fd, const void *data, size_t n, off_t offset) { return put_at(fd, data, n, offset); }
ssize_t pwrite64(int fd, const void *data, size_t n, off64_t offset) { return put_at(fd, data, n, offset); }

ssize_t write(int fd, const void *data, size_t n) {
    struct seen s;
    if (!see(fd, &s)) return REAL(write)(fd, data, n);
    if (slow_us) usleep(slow_us);
    pthread_mutex_lock(&lock);
    ssize_t w = -1;
    see(fd, &s);
    int64_t at = fcntl(fd, F_GETFL) & O_APPEND ? s.size : lseek(fd, 0, SEEK_CUR);
    size_t most = fits(&s, at, n);
    if (n && !most) errno = ENOSPC;
    else w = REAL(write)(fd, data, most);
    if (w > 0) note('W', s.inode, s.name, at, data, w);
    pthread_mutex_unlock(&lock);
    return w;
}

ssize_t writev(int fd, const struct iovec *v, int count) {
    struct seen s;
    if (!see(fd, &s)) return REAL(writev)(fd, v, count);
    return count ? write(fd, v[0].iov_base, v[0].iov_len) : 0; /* a short write is a lawful one */
}

static int shortened(int fd, off_t size, int (*f)(int, off_t)) {
    struct seen s;
    pthread_mutex_lock(&lock);
    int ours = see(fd, &s), rc = f(fd, size);
    if (ours && rc == 0) frees(s.size - size), note('T', s.inode, s.name, size, "", 0);
    pthread_mutex_unlock(&lock);
    return rc;
}

int ftruncate(int fd, off_t size) { return shortened(fd, size, REAL(ftruncate)); }
int ftruncate64(int fd, off64_t size) { return shortened(fd, size, REAL(ftruncate)); }

static int synced(int fd, int (*f)(int)) {
    struct seen s;
    pthread_mutex_lock(&lock);
    int ours = see(fd, &s), rc = f(fd);
    if (ours && rc == 0) note(s.folder ? 'D' : 'S', s.inode, s.name, 0, "", 0);
    pthread_mutex_unlock(&lock);
    return rc;
}

int fsync(int fd) { return synced(fd, REAL(fsync)); }
int fdatasync(int fd) { return synced(fd, REAL(fdatasync)); }

static int moved(int from_at, const char *from, int to_at, const char *to) {
    char a[NAME_MAX + 1], b[NAME_MAX + 1];
    uint64_t inode, old;
    struct stat st;
    pthread_mutex_lock(&lock);
    int ours = named(from, a, &inode) + 2 * named(to, b, &old);
    int64_t freed = ours && stat(to, &st) == 0 ? st.st_size : 0;
    int rc = REAL(renameat)(from_at, from, to_at, to);
    if (ours && rc == 0) frees(freed);
    if (ours == 3 && rc == 0) note('R', inode, a, 0, b, strlen(b));
    else if (ours && rc == 0) note('X', inode, from, 0, "rename over the border", 22);
    pthread_mutex_unlock(&lock);
    return rc;
}

int rename(const char *from, const char *to) { return moved(AT_FDCWD, from, AT_FDCWD, to); }
int renameat(int from_at, const char *from, int to_at, const char *to) { return moved(from_at, from, to_at, to); }
int renameat2(int from_at, const char *from, int to_at, const char *to, unsigned flags) {
    if (flags) return errno = EINVAL, -1;
    return moved(from_at, from, to_at, to);
}

static int removed(int at, const char *path, int flags) {
    char name[NAME_MAX + 1];
    uint64_t inode;
    struct stat st;
    pthread_mutex_lock(&lock);
    int ours = named(path, name, &inode);
    int64_t freed = ours && stat(path, &st) == 0 ? st.st_size : 0;
    int rc = REAL(unlinkat)(at, path, flags);
    if (ours && rc == 0) frees(freed), note('U', inode, name, 0, "", 0);
    pthread_mutex_unlock(&lock);
    return rc;
}

int unlink(const char *path) { return removed(AT_FDCWD, path, 0); }
int unlinkat(int at, const char *path, int flags) { return removed(at, path, flags); }

/* Below: what is refused, so that the caller takes the plain way, or logged as what cannot be replayed. */
static int refused(int fd, int error) {
    struct seen s;
    if (!see(fd, &s)) return 0;
    errno = error;
    return 1;
}

ssize_t sendfile(int out, int in, off_t *offset, size_t n) {
    if (refused(out, ENOTSOCK)) return -1;
    return ((ssize_t(*)(int, int, off_t *, size_t))real("sendfile"))(out, in, offset, n);
}
ssize_t sendfile64(int out, int in, off_t *offset, size_t n) { return sendfile(out, in, offset, n); }
ssize_t copy_file_range(int in, off64_t *in_at, int out, off64_t *out_at, size_t n, unsigned flags) {
    if (refused(out, EINVAL)) return -1;
    return REAL(copy_file_range)(in, in_at, out, out_at, n, flags);
}
int fallocate(int fd, int mode, off_t offset, off_t n) {
    if (refused(fd, EOPNOTSUPP)) return -1;
    return REAL(fallocate)(fd, mode, offset, n);
}
int posix_fallocate(int fd, off_t offset, off_t n) {
    if (refused(fd, EOPNOTSUPP)) return EOPNOTSUPP;
    return REAL(posix_fallocate)(fd, offset, n);
}
void *mmap(void *at, size_t n, int protection, int flags, int fd, off_t offset) {
    struct seen s;
    if (fd >= 0 && (protection & PROT_WRITE) && (flags & MAP_SHARED) && see(fd, &s))
        note('X', s.inode, s.name, 0, "mmap", 4);
    return REAL(mmap)(at, n, protection, flags, fd, offset);
}
int link(const char *from, const char *to) {
    char name[NAME_MAX + 1];
    uint64_t inode;
    if (named(to, name, &inode)) note('X', inode, name, 0, "link", 4);
    return REAL(link)(from, to);
}
