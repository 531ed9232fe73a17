// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * Direct I/O between a file and memory of a PCI device:
 *
 *	p2pmem moves FILE MEMORY	what goes there by one way comes back by the other
 *	p2pmem refused FILE MEMORY	direct I/O is refused with EINVAL
 *	p2pmem plain FILE MEMORY	the same as moves, but by plain reads and writes of a file not opened for direct I/O
 *
 * MEMORY is a file `p2pmem/allocate` of sysfs. The first MiB of FILE is written over.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define SPAN (1UL << 20)
#define PAGE 4096UL

static void check(int good, const char *what, int line)
{
	if (good)
		return;
	fprintf(stderr, "line %d: %s: %s\n", line, what, strerrorname_np(errno));
	exit(1);
}

#define CHECK(what) check(!!(what), #what, __LINE__)

/* Another content for each seed. */
static void fill(unsigned char *bytes, size_t length, uint64_t seed)
{
	uint64_t value = seed;

	for (size_t at = 0; at < length; at += sizeof(value)) {
		value = value * 6364136223846793005ULL + 1442695040888963407ULL;
		memcpy(bytes + at, &value, sizeof(value));
	}
}

static unsigned char *map(int fd, int flags)
{
	void *bytes = mmap(NULL, SPAN, PROT_READ | PROT_WRITE, flags, fd, 0);

	CHECK(bytes != MAP_FAILED);
	return bytes;
}

/* Both directions, for lengths of one block up to all of it; returns how many bytes the device's memory was used for. */
static size_t moves(int device_io, int plain_io, unsigned char *device, unsigned char *ram)
{
	unsigned char *wanted = map(-1, MAP_PRIVATE | MAP_ANONYMOUS);
	size_t moved = 0;
	uint64_t seed = 1;

	for (size_t length = PAGE; length <= SPAN; length *= 4) {
		off_t offset = SPAN - length;

		fill(wanted, length, seed++);
		memcpy(device, wanted, length);
		CHECK(pwrite(device_io, device, length, offset) == (ssize_t)length);
		memset(ram, 0, length);
		CHECK(pread(plain_io, ram, length, offset) == (ssize_t)length);
		CHECK(!memcmp(ram, wanted, length));

		fill(wanted, length, seed++);
		memcpy(ram, wanted, length);
		CHECK(pwrite(plain_io, ram, length, offset) == (ssize_t)length);
		memset(device, 0, length);
		CHECK(pread(device_io, device, length, offset) == (ssize_t)length);
		CHECK(!memcmp(device, wanted, length));
		moved += 2 * length;
	}
	return moved;
}

int main(int argc, char **argv)
{
	int file, device_io, memory;
	unsigned char *device;

	if (argc != 4) {
		fputs("Wrong arguments\n", stderr);
		return 2;
	}
	/* Both past the page cache, so that what is read is what the disk has. */
	file = open(argv[2], O_RDWR | O_DIRECT | O_CLOEXEC);
	CHECK(file >= 0);
	memory = open(argv[3], O_RDWR | O_CLOEXEC);
	CHECK(memory >= 0);
	device = map(memory, MAP_SHARED);
	memset(device, 1, PAGE);

	if (!strcmp(argv[1], "refused")) {
		CHECK(pread(file, device, PAGE, 0) == -1 && errno == EINVAL);
		CHECK(pwrite(file, device, PAGE, 0) == -1 && errno == EINVAL);
		puts("refused");
		return 0;
	}
	device_io = file;
	if (!strcmp(argv[1], "plain")) {
		device_io = open(argv[2], O_RDWR | O_CLOEXEC);
		CHECK(device_io >= 0);
	}
	printf("%zu\n", moves(device_io, file, device, map(-1, MAP_PRIVATE | MAP_ANONYMOUS)));
	return 0;
}
