// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * Has an NVMe controller move blocks to and from memory of another device, with no driver bound to either:
 *
 *	nvme_peer NVME-ADDRESS DEVICE-ADDRESS prepare
 *	nvme_peer NVME-ADDRESS DEVICE-ADDRESS move BYTES
 *	nvme_peer NVME-ADDRESS DEVICE-ADDRESS stream
 *
 * The memory is BAR 2 of the other device. The first blocks of namespace 1 are overwritten.
 *
 * "prepare" has both answer at their BARs, and the controller access memory. "move" writes so many bytes from there to the disk and reads them back to another place there, and looks at each of
 * them through the BAR. "stream" prints a line and reads blocks to that memory until the controller reports an error;
 * then it prints the status, and that the controller still reads blocks to memory of this machine. Anything else is
 * "failed", and the status 1.
 */
#define _GNU_SOURCE

/* What each page of the program is for. */
enum {
	ADMIN_SQ,
	ADMIN_CQ,
	IO_SQ,
	IO_CQ,
	LIST,
	DATA,
	PAGES,
};

#include "nvme.h"

#define BLOCK 512UL
/* Bytes of one command. */
#define CHUNK (16 * PAGE)

/* The other device's memory. */
static volatile uint64_t *peer;
static uint64_t peer_address;
static uint64_t peer_bytes;

/* Moves blocks, as many as fit into `bytes`, at most CHUNK, between the disk and a physical address. */
static int transfer(struct queue *io, uint8_t opcode, uint64_t block, uint64_t address, uint64_t bytes)
{
	struct command command = {
		.opcode = opcode,
		.nsid = 1,
		.data = { htole64(address) },
		.dword = { htole32(block), htole32(block >> 32), htole32(bytes / BLOCK - 1) },
	};
	uint64_t *list = page(LIST), at;
	int status;

	for (at = PAGE; at < bytes; at += PAGE)
		list[at / PAGE - 1] = htole64(address + at);
	if (bytes > 2 * PAGE)
		command.data[1] = htole64(physical[LIST]);
	else if (bytes > PAGE)
		command.data[1] = htole64(address + PAGE);
	status = execute(io, &command);
	if (status < 0)
		fail("no answer, CSTS %#x", get(CSTS));
	return status;
}

static uint64_t word(uint64_t at)
{
	return (at + 1) * 0x9e3779b97f4a7c15ULL;
}

/* From the beginning of the memory to the disk, and to the middle of it. */
static void move(struct queue *io, uint64_t bytes)
{
	const uint64_t middle = peer_bytes / 2;
	uint64_t at;
	int status;

	if (!bytes || bytes % PAGE || bytes > middle)
		fail("%#" PRIx64 " bytes do not fit", bytes);
	for (at = 0; at < bytes; at += 8) {
		peer[at / 8] = word(at);
		peer[(middle + at) / 8] = 0;
	}
	for (at = 0; at < bytes; at += CHUNK) {
		const uint64_t part = bytes - at < CHUNK ? bytes - at : CHUNK;

		status = transfer(io, 1, at / BLOCK, peer_address + at, part);
		if (status)
			fail("write at %#" PRIx64 ": status %#x", at, status);
		status = transfer(io, 2, at / BLOCK, peer_address + middle + at, part);
		if (status)
			fail("read at %#" PRIx64 ": status %#x", at, status);
	}
	for (at = 0; at < bytes; at += 8)
		if (peer[(middle + at) / 8] != word(at))
			fail("other bytes at %#" PRIx64, at);
	printf("moved %" PRIu64 " bytes there and back\n", bytes);
}

static void stream(struct queue *io)
{
	unsigned long chunks = 0;
	int status;

	printf("streaming\n");
	do {
		const uint64_t at = chunks++ % (peer_bytes / CHUNK) * CHUNK;

		status = transfer(io, 2, 0, peer_address + at, CHUNK);
	} while (!status);
	printf("status %#x after %lu transfers\n", status, chunks);
	status = transfer(io, 2, 0, physical[DATA], PAGE);
	if (status)
		fail("status %#x of a read to memory", status);
	printf("alive\n");
}

/* Has a function answer at its BARs, and perhaps access memory. */
static int enable_function(const char *address, uint32_t bits)
{
	int enabler = open_device(address, "enable", O_WRONLY);
	int config = open_device(address, "config", O_RDWR | O_SYNC);

	check(write(enabler, "1", 1) == 1, "enable");
	close(enabler);
	config_write(config, 4, config_read(config, 4) | bits);
	return config;
}

static volatile void *map_bar(const char *address, const char *file, uint64_t *bytes)
{
	int resource = open_device(address, file, O_RDWR | O_SYNC);
	struct stat stat;
	void *mapping;

	check(fstat(resource, &stat) == 0, file);
	*bytes = stat.st_size;
	mapping = mmap(NULL, *bytes, PROT_READ | PROT_WRITE, MAP_SHARED, resource, 0);
	check(mapping != MAP_FAILED, file);
	close(resource);
	return mapping;
}

int main(int argc, char **argv)
{
	struct queue admin, io;
	uint64_t bytes;
	int config, moves, streams;

	moves = argc == 5 && !strcmp(argv[3], "move");
	streams = argc == 4 && !strcmp(argv[3], "stream");
	if (!moves && !streams && (argc != 4 || strcmp(argv[3], "prepare"))) {
		fprintf(stderr, "usage: nvme_peer NVME-ADDRESS DEVICE-ADDRESS prepare | move BYTES | stream\n");
		return 2;
	}
	setvbuf(stdout, NULL, _IOLBF, 0);
	config = enable_function(argv[2], 2);
	enable_function(argv[1], 6);
	if (!moves && !streams)
		return 0;
	lock_memory();
	peer_address = config_read(config, 0x18) & ~0xfULL;
	peer_address |= (uint64_t)config_read(config, 0x1c) << 32;
	peer = map_bar(argv[2], "resource2", &peer_bytes);
	bar = map_bar(argv[1], "resource0", &bytes);
	admin = enable();
	io = create(&admin);
	if (moves)
		move(&io, strtoull(argv[4], NULL, 0));
	else
		stream(&io);
	disable();
	return 0;
}
