// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * What a process can do with device memory at the guest driver:
 *
 *	device_memory features NODE			prints the device's features
 *	device_memory unsupported NODE BAR		a backend that does not tunnel
 *	device_memory refusals NODE BAR OTHER SMALL	what is not one BAR is refused; SMALL is less than a page
 *	device_memory life NODE BAR			regions come and go with the mapping
 *	device_memory race NODE BAR			one thread registers what another one unmaps
 *	device_memory unmap NODE BAR [dead]		unmaps a region; then the backend is dead, or not
 *	device_memory wait NODE BAR			keeps a region until SIGTERM, when the device has gone
 *	device_memory parts NODE BAR			the same of several regions
 *	device_memory late NODE BAR			what a driver that is unbound has not registered yet it does not
 *
 * BAR is a resource file of sysfs of 16 pages or more. Marks, which are pins of ordinary memory, show the backend where
 * in its order of requests the program is.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "farlane_abi.h"

#define PAGE 4096UL
#define PAGES 16UL
#define PARTS 4UL
#define RW (PROT_READ | PROT_WRITE)
#define ROUNDS 400

/* More than a header: what a tunnel's first segment is. */
#define SEGMENT_BYTES (FARLANE_HEADER_SEGMENT_BYTES + 16 * PAGE)

static int node;
static int bar;
static char *marked;

static void check(int good, const char *what, int line)
{
	if (good)
		return;
	fprintf(stderr, "line %d: %s: %s\n", line, what, strerrorname_np(errno));
	exit(1);
}

#define CHECK(what) check(!!(what), #what, __LINE__)

static int pin_with(unsigned long request, const void *at, size_t bytes, uint32_t flags)
{
	struct farlane_pin pin = {
		.address = (uintptr_t)at,
		.length = bytes,
		.flags = flags,
	};

	return ioctl(node, request, &pin) ? -errno : (int)pin.region;
}

static int pin(const void *at, size_t bytes, uint32_t flags)
{
	return pin_with(FARLANE_IOC_PIN_DEVICE, at, bytes, flags);
}

static int detach(int region)
{
	struct farlane_detach arg = { .region = region };

	return ioctl(node, FARLANE_IOC_DETACH, &arg) ? -errno : 0;
}

static void mark(void)
{
	int region = pin_with(FARLANE_IOC_PIN, marked, PAGE, 0);

	CHECK(region >= 0);
	CHECK(!detach(region));
}

static char *map_at(void *at, int fd, unsigned long page, unsigned long pages, int protection)
{
	char *mapped = mmap(at, pages * PAGE, protection, MAP_SHARED | (at ? MAP_FIXED : 0), fd, page * PAGE);

	CHECK(mapped != MAP_FAILED);
	return mapped;
}

static char *map(int protection)
{
	return map_at(NULL, bar, 0, PAGES, protection);
}

static int open_file(const char *path, int how)
{
	int fd = open(path, how | O_CLOEXEC);

	if (fd < 0) {
		fprintf(stderr, "%s: %s\n", path, strerrorname_np(errno));
		exit(1);
	}
	return fd;
}

static char *segment(void)
{
	struct farlane_segment segment = { .length = SEGMENT_BYTES };
	char *mapped;

	CHECK(!ioctl(node, FARLANE_IOC_SEGMENT, &segment));
	CHECK(segment.length == SEGMENT_BYTES);
	mapped = mmap(NULL, segment.length, RW, MAP_SHARED, node, segment.mmap_offset);
	CHECK(mapped != MAP_FAILED);
	return mapped;
}

static int features(void)
{
	struct farlane_info info;

	CHECK(!ioctl(node, FARLANE_IOC_INFO, &info));
	printf("%u\n", info.features);
	return 0;
}

static int unsupported(void)
{
	char *bytes = map(RW);

	CHECK(pin(bytes, PAGE, 0) == -EOPNOTSUPP);
	CHECK(pin_with(FARLANE_IOC_PIN, marked, PAGE, FARLANE_FLAG_PHONY) == -EOPNOTSUPP);
	CHECK(pin_with(FARLANE_IOC_PIN, marked, PAGE, FARLANE_FLAG_WRITABLE) >= 0);
	return 0;
}

static int refusals(const char *other, const char *small)
{
	char *bytes = map(RW), *shared = segment(), *ram, *page;
	int fd;

	/* Words that mean nothing. */
	CHECK(pin(bytes + 512, PAGE, 0) == -EINVAL);
	CHECK(pin(bytes, PAGE + 512, 0) == -EINVAL);
	CHECK(pin(bytes, 0, 0) == -EINVAL);
	CHECK(pin(bytes, PAGE, FARLANE_FLAG_PHONY) == -EINVAL);
	CHECK(pin(bytes, PAGE, 1U << 31) == -EINVAL);
	CHECK(pin(bytes, FARLANE_MAX_REGION_BYTES + PAGE, 0) == -EINVAL);
	CHECK(pin((void *)-PAGE, PAGE, 0) == -EINVAL);
	CHECK(pin_with(FARLANE_IOC_PIN, marked, PAGE, 1U << 31) == -EINVAL);
	CHECK(pin_with(FARLANE_IOC_PIN, marked + 512, PAGE, FARLANE_FLAG_PHONY) == -EINVAL);
	CHECK(pin_with(FARLANE_IOC_PIN, marked, 512, FARLANE_FLAG_PHONY) == -EINVAL);

	/* Memory, of whatever kind, and nothing. */
	CHECK(pin(marked, PAGE, 0) == -EINVAL);
	CHECK(pin(shared, PAGE, 0) == -EINVAL);
	ram = mmap(NULL, 2 * PAGE, RW, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(ram != MAP_FAILED);
	CHECK(pin(ram, PAGE, 0) == -EINVAL);
	CHECK(!munmap(ram, 2 * PAGE));
	CHECK(pin(ram, PAGE, 0) == -EFAULT);
	CHECK(pin(NULL, PAGE, 0) == -EFAULT);

	/* Half of it is something else, or nothing. */
	page = mmap(bytes + 3 * PAGE, PAGE, RW, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
	CHECK(page != MAP_FAILED);
	CHECK(pin(bytes, 4 * PAGE, 0) == -EINVAL);
	CHECK(!munmap(page, PAGE));
	CHECK(pin(bytes, 4 * PAGE, 0) == -EFAULT);
	CHECK(pin(bytes, 3 * PAGE, 0) >= 0);

	/* Pages of two BARs, and one that is not all of the BAR's. */
	fd = open_file(other, O_RDWR);
	map_at(bytes + 3 * PAGE, fd, 0, 1, RW);
	CHECK(pin(bytes, 4 * PAGE, 0) == -EINVAL);
	CHECK(pin(bytes + 3 * PAGE, PAGE, 0) >= 0);
	fd = open_file(small, O_RDWR);
	page = map_at(NULL, fd, 0, 1, RW);
	CHECK(pin(page, PAGE, 0) == -EINVAL);

	/* Rights that the process does not have. */
	page = map(PROT_READ);
	CHECK(pin(page, PAGE, FARLANE_FLAG_WRITABLE) == -EACCES);
	CHECK(pin(page, PAGE, 0) >= 0);
	page = map(PROT_NONE);
	CHECK(pin(page, PAGE, 0) == -EACCES);

	/* A phony buffer is one. */
	CHECK(pin_with(FARLANE_IOC_PIN, marked, PAGE, FARLANE_FLAG_PHONY | FARLANE_FLAG_WRITABLE) >= 0);
	return 0;
}

static void clear_refs(void)
{
	int fd = open_file("/proc/self/clear_refs", O_WRONLY);

	CHECK(write(fd, "4", 1) == 1);
	close(fd);
}

static int life(const char *path)
{
	struct farlane_info info;
	char *bytes = map(RW), *moved;
	int status, fd;
	pid_t child;

	segment();
	/* Twice the same; a page of it goes, and so do both. */
	CHECK(pin(bytes + PAGE, 2 * PAGE, FARLANE_FLAG_WRITABLE) == 1);
	CHECK(pin(bytes + PAGE, 2 * PAGE, 0) == 2);
	CHECK(!munmap(bytes + 2 * PAGE, PAGE));
	mark();
	CHECK(!detach(1));
	CHECK(detach(1) == -ENOENT);
	CHECK(!detach(2));

	/* Pages that are not beside each other, and mappings that are. */
	map_at(bytes, bar, 0, PAGES, RW);
	map_at(bytes + 4 * PAGE, bar, 5, 1, RW);
	CHECK(pin(bytes + 3 * PAGE, 2 * PAGE, FARLANE_FLAG_WRITABLE) == 1);
	map_at(bytes + 7 * PAGE, bar, 7, 1, RW);
	CHECK(pin(bytes + 6 * PAGE, 3 * PAGE, FARLANE_FLAG_WRITABLE) == 2);

	/* What a child does with its copy is of no interest. */
	child = fork();
	CHECK(child >= 0);
	if (!child) {
		CHECK(ioctl(node, FARLANE_IOC_INFO, &info) == -1 && errno == EPERM);
		CHECK(pin(bytes, PAGE, 0) == -EPERM);
		CHECK(!munmap(bytes, PAGES * PAGE));
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	clear_refs();
	mark();

	/* Other rights, another place. */
	CHECK(!mprotect(bytes + 6 * PAGE, PAGE, PROT_READ));
	mark();
	moved = mremap(bytes + 3 * PAGE, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, marked + PAGE);
	CHECK(moved == marked + PAGE);
	mark();
	CHECK(!detach(1) && !detach(2));

	/* Taken away by the process; and, mapped from a file that it may only read, kept to its end. */
	CHECK(pin(bytes + 10 * PAGE, PAGE, FARLANE_FLAG_WRITABLE) == 1);
	CHECK(!detach(1));
	fd = open_file(path, O_RDONLY);
	bytes = map_at(NULL, fd, 0, PAGES, PROT_READ);
	CHECK(pin(bytes, PAGES * PAGE, 0) == 1);
	return 0;
}

static atomic_int stop;

static void *remap(void *at)
{
	while (!stop) {
		map_at(at, bar, 0, 4, RW);
		usleep(rand() % 100);
		CHECK(!munmap(at, 4 * PAGE));
		map_at(at, bar, 4, 4, RW);
		usleep(rand() % 100);
	}
	return NULL;
}

static int race(void)
{
	unsigned int pinned = 0, rounds;
	pthread_t thread;
	char *bytes;
	int region;

	bytes = mmap(NULL, 4 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(bytes != MAP_FAILED);
	CHECK(!pthread_create(&thread, NULL, remap, bytes));
	/* How often it is there to be found is chance. */
	for (rounds = 0; rounds < ROUNDS || !pinned; rounds++) {
		region = pin(bytes, 4 * PAGE, FARLANE_FLAG_WRITABLE);
		CHECK(region >= 0 || region == -EFAULT || region == -EINVAL);
		if (region < 0)
			continue;
		pinned++;
		CHECK(!detach(region));
	}
	stop = 1;
	CHECK(!pthread_join(thread, NULL));
	printf("%u of %u\n", pinned, rounds);
	return 0;
}

static int unmap(int dead)
{
	struct farlane_info info;
	char *bytes = map(RW);
	int region = pin(bytes, PAGES * PAGE, FARLANE_FLAG_WRITABLE);

	CHECK(region >= 0);
	CHECK(!munmap(bytes, PAGES * PAGE));
	puts("unmapped");
	fflush(stdout);
	if (dead)
		CHECK(ioctl(node, FARLANE_IOC_INFO, &info) == -1 && errno == ENODEV);
	else
		CHECK(!detach(region));
	return 0;
}

static int keep(unsigned long parts)
{
	size_t length = PAGES * PAGE / parts;
	char *bytes = map(RW);
	unsigned long part;
	sigset_t term;
	int region, signal;

	sigemptyset(&term);
	sigaddset(&term, SIGTERM);
	CHECK(!sigprocmask(SIG_BLOCK, &term, NULL));
	for (part = 0; part < parts; part++) {
		region = pin(bytes + part * length, length, FARLANE_FLAG_WRITABLE);
		CHECK(region == (int)part);
	}
	puts("pinned");
	fflush(stdout);
	CHECK(!sigwait(&term, &signal));
	/* The device has gone: its regions are empty, and what is still mapped belongs to nobody. */
	for (part = 0; part < parts; part++)
		CHECK(!detach(part));
	region = pin(bytes, PAGES * PAGE, FARLANE_FLAG_WRITABLE);
	CHECK(region == -EINVAL || region == -EFAULT);
	return 0;
}

static int late(void)
{
	CHECK(pin(map(RW), PAGE, FARLANE_FLAG_WRITABLE) == -ENODEV);
	puts("refused");
	fflush(stdout);
	return 0;
}

int main(int argc, char **argv)
{
	const char *what = argc > 2 ? argv[1] : "";

	if (argc > 2)
		node = open_file(argv[2], O_RDWR);
	if (argc > 3)
		bar = open_file(argv[3], O_RDWR);
	marked = mmap(NULL, 2 * PAGE, RW, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(marked != MAP_FAILED);
	memset(marked, 1, 2 * PAGE);
	if (!strcmp(what, "features"))
		return features();
	if (!strcmp(what, "unsupported") && argc == 4)
		return unsupported();
	if (!strcmp(what, "refusals") && argc == 6)
		return refusals(argv[4], argv[5]);
	if (!strcmp(what, "life") && argc == 4)
		return life(argv[3]);
	if (!strcmp(what, "race") && argc == 4)
		return race();
	if (!strcmp(what, "unmap") && argc >= 4)
		return unmap(argc == 5 && !strcmp(argv[4], "dead"));
	if (!strcmp(what, "wait") && argc == 4)
		return keep(1);
	if (!strcmp(what, "parts") && argc == 4)
		return keep(PARTS);
	if (!strcmp(what, "late") && argc == 4)
		return late();
	fputs("Wrong arguments\n", stderr);
	return 2;
}
