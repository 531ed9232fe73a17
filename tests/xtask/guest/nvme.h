/* SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause */
/*
 * Drives an NVMe controller from user space, with no driver bound to it: registers, queues, and memory whose physical
 * addresses are known. Who includes it has defined PAGES, how many pages of memory it uses, and ADMIN_SQ, ADMIN_CQ,
 * IO_SQ and IO_CQ, which of them hold queues.
 */
#ifndef NVME_H
#define NVME_H

#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096UL
#define BAR_BYTES (4 * PAGE)

/* Registers (NVM Express 1.4, 3.1). */
#define CC 0x14
#define CSTS 0x1c
#define AQA 0x24
#define ASQ 0x28
#define ACQ 0x30
#define DOORBELLS 0x1000
#define ENABLED 0x00460001U
#define READY 1U
#define FATAL 2U

/* Longer than a controller takes for anything. */
#define TIMEOUT_S 60

#define ENTRIES 64U

struct command {
	uint8_t opcode;
	uint8_t flags;
	uint16_t cid;
	uint32_t nsid;
	uint64_t reserved[2];
	uint64_t data[2];
	uint32_t dword[6];
};

struct completion {
	uint32_t dword[2];
	uint16_t sq_head;
	uint16_t sq;
	uint16_t cid;
	uint16_t status;
};

struct queue {
	unsigned int id;
	volatile struct command *sq;
	volatile struct completion *cq;
	unsigned int tail;
	unsigned int head;
	unsigned int phase;
};

static volatile uint8_t *bar;
static uint8_t *memory;
static uint64_t physical[PAGES];
static unsigned long commands;
static unsigned long answers;

static void fail(const char *format, ...)
{
	va_list arguments;

	printf("failed: ");
	va_start(arguments, format);
	vprintf(format, arguments);
	va_end(arguments);
	printf("\n");
	exit(1);
}

static void check(int good, const char *what)
{
	if (!good)
		fail("%s: %s", what, strerror(errno));
}

static uint32_t get(unsigned int offset)
{
	return le32toh(*(volatile uint32_t *)(bar + offset));
}

static void set(unsigned int offset, uint32_t value)
{
	*(volatile uint32_t *)(bar + offset) = htole32(value);
}

static void set_quad(unsigned int offset, uint64_t value)
{
	set(offset, (uint32_t)value);
	set(offset + 4, (uint32_t)(value >> 32));
}

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

/* Waits until bits of CSTS are so, or, if that may be, the controller has failed. */
static int wait_for(uint32_t mask, uint32_t value)
{
	const double began = now();
	uint32_t status;

	do {
		status = get(CSTS);
		if ((status & mask) == value)
			return 0;
		if (status != 0xffffffffU && (status & FATAL) && value)
			return -1;
		usleep(100);
	} while (now() - began < TIMEOUT_S);
	fail("CSTS is %#x after %d s", status, TIMEOUT_S);
	return -1;
}

static void disable(void)
{
	set(CC, 0);
	wait_for(READY | FATAL, 0);
}

static void *page(int index)
{
	return memory + index * PAGE;
}

static void ring(const struct queue *queue)
{
	set(DOORBELLS + queue->id * 8, queue->tail);
}

static void push(struct queue *queue, const struct command *command)
{
	struct command copy = *command;

	copy.cid = queue->tail;
	memcpy((void *)&queue->sq[queue->tail], &copy, sizeof(copy));
	__sync_synchronize();
	queue->tail = (queue->tail + 1) % ENTRIES;
	commands++;
}

static int pop(struct queue *queue, uint16_t *status)
{
	const uint16_t last = le16toh(queue->cq[queue->head].status);

	if ((last & 1) != queue->phase)
		return 0;
	*status = last >> 1 & 0x7ff;
	queue->head = (queue->head + 1) % ENTRIES;
	if (queue->head == 0)
		queue->phase ^= 1;
	set(DOORBELLS + queue->id * 8 + 4, queue->head);
	answers++;
	return 1;
}

/* Takes what has been answered within a while. Returns the last status, or -1 if there was no answer. */
static int drain(struct queue *queue, double seconds, unsigned int limit)
{
	const double began = now();
	int last = -1;
	uint16_t status;

	do {
		while (limit && pop(queue, &status)) {
			last = status;
			limit--;
		}
		if (!limit || get(CSTS) & FATAL)
			break;
		usleep(50);
	} while (now() - began < seconds);
	return last;
}

static struct queue make_queue(unsigned int id, int sq, int cq)
{
	struct queue queue = { .id = id, .sq = page(sq), .cq = page(cq), .phase = 1 };

	memset(page(sq), 0, PAGE);
	memset(page(cq), 0, PAGE);
	return queue;
}

static int execute(struct queue *queue, const struct command *command)
{
	push(queue, command);
	ring(queue);
	return drain(queue, TIMEOUT_S, 1);
}

/* Enables the controller as a driver does. */
static struct queue enable(void)
{
	struct queue admin = make_queue(0, ADMIN_SQ, ADMIN_CQ);

	disable();
	set(AQA, (ENTRIES - 1) * 0x10001);
	set_quad(ASQ, physical[ADMIN_SQ]);
	set_quad(ACQ, physical[ADMIN_CQ]);
	set(CC, ENABLED);
	if (wait_for(READY, READY))
		fail("a proper configuration is a fatal error");
	return admin;
}

/* Creates I/O queue pair 1. */
static struct queue create(struct queue *admin)
{
	struct queue queue = make_queue(1, IO_SQ, IO_CQ);
	struct command command = {
		.opcode = 5,
		.data = { physical[IO_CQ] },
		.dword = { (ENTRIES - 1) << 16 | 1, 1 },
	};

	if (execute(admin, &command))
		fail("no completion queue");
	command.opcode = 1;
	command.data[0] = physical[IO_SQ];
	command.dword[1] = 1 << 16 | 1;
	if (execute(admin, &command))
		fail("no submission queue");
	return queue;
}

static uint32_t config_read(int config, off_t at)
{
	uint32_t value;

	check(pread(config, &value, 4, at) == 4, "config");
	return le32toh(value);
}

static void config_write(int config, off_t at, uint32_t value)
{
	value = htole32(value);
	check(pwrite(config, &value, 4, at) == 4, "config");
}

static void lock_memory(void)
{
	int pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
	int i;

	check(pagemap >= 0, "pagemap");
	memory = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE,
		      MAP_PRIVATE | MAP_ANONYMOUS | MAP_LOCKED | MAP_POPULATE, -1, 0);
	check(memory != MAP_FAILED, "locked memory");
	for (i = 0; i < PAGES; i++) {
		const off_t entry = (uintptr_t)page(i) / PAGE * 8;
		uint64_t value;

		memset(page(i), 0xff, PAGE);
		check(pread(pagemap, &value, 8, entry) == 8, "pagemap");
		physical[i] = (value & ((1ULL << 55) - 1)) * PAGE;
		if (!(value >> 63) || !physical[i])
			fail("physical addresses are not told");
	}
	close(pagemap);
}

static int open_device(const char *address, const char *file, int flags)
{
	char path[256];
	int fd;

	snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/%s", address, file);
	fd = open(path, flags | O_CLOEXEC);
	check(fd >= 0, path);
	return fd;
}

#endif
