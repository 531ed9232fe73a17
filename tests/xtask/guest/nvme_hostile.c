// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * A guest that abuses its NVMe controller from user space, with no driver bound to it:
 *
 *	nvme_hostile PCI-ADDRESS SEED ROUNDS
 *
 * The first 2048 blocks of namespace 1 are overwritten, and a controller that can format would do so: this is for one
 * whose namespaces hold nothing of value. Nothing that the program asks for makes the controller write into memory of
 * this guest but the program's own and what lies below 1 MiB, which Linux does not use: addresses lead into its locked
 * pages, or to where there is no memory. What the controller itself writes, taken for addresses, leads beyond 4 GiB, so
 * the guest should have less memory than that.
 *
 * Each attack ends with a line. The last one is "survived COMMANDS commands, ANSWERS answers"; the controller is
 * disabled then, and works with a driver again. "failed" and the status 1 mean that the controller did not do what a
 * reset promises.
 */
#define _GNU_SOURCE

/* What each page of the program is for. */
enum {
	ADMIN_SQ,
	ADMIN_CQ,
	IO_SQ,
	IO_CQ,
	SHADOW,
	EVENTS,
	ANSWERS,
	LISTS = 8,
	LIST_COUNT = 4,
	DATA = 16,
	DATA_COUNT = 48,
	PAGES = DATA + DATA_COUNT,
};

#include "nvme.h"

#define BLOCKS_USED 2048U

/* Beyond all memory, a page. */
static uint64_t beyond;
static uint64_t bar_address;
static uint64_t state;

static uint64_t next(void)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state * 0x2545f4914f6cdd1dULL;
}

static uint64_t below(uint64_t limit)
{
	return (next() >> 11) % limit;
}

/* A page of the program that may get any data. */
static uint64_t data_page(void)
{
	return physical[DATA + below(DATA_COUNT)];
}

/* Nowhere. */
static uint64_t absurd(void)
{
	switch (below(8)) {
	case 0:
		return ~0xfffULL;
	case 1:
		return 1ULL << (47 + below(16));
	case 2:
		return beyond + below(1024) * PAGE;
	case 3:
		return ~0ULL - below(4096);
	case 4:
		return bar_address + DOORBELLS;
	case 5:
		return bar_address + below(BAR_BYTES);
	case 6:
		return 0xfee00000ULL;
	default:
		return (beyond | next() << 40) & ~(PAGE - 1);
	}
}

static void write_descriptor(uint8_t *at, uint64_t address, uint32_t length, uint8_t kind)
{
	address = htole64(address);
	length = htole32(length);
	memset(at, 0, 16);
	memcpy(at, &address, 8);
	memcpy(at + 8, &length, 4);
	at[15] = kind;
}

/* A descriptor of a scatter gather list: data stays inside of a page of the program. */
static void write_random_descriptor(uint8_t *at)
{
	const uint32_t offset = below(PAGE);
	const uint64_t list = physical[LISTS + LIST_COUNT - 1];

	switch (below(8)) {
	case 0:
		write_descriptor(at, absurd(), next(), below(256));
		break;
	case 1:
		write_descriptor(at, list, 16 * (1 + below(256)), 0x20);
		break;
	case 2:
		write_descriptor(at, list, 16 * (1 + below(256)), 0x30);
		break;
	case 3:
		write_descriptor(at, 0, next(), 0x10);
		break;
	default:
		write_descriptor(at, data_page() + offset, below(PAGE - offset + 1), 0);
	}
}

static void fill_scatter_list(void)
{
	uint8_t *list = page(LISTS + LIST_COUNT - 1);
	unsigned int at;

	for (at = 0; at < PAGE; at += 16)
		write_random_descriptor(list + at);
}

/*
 * What a list may hold: pages for data, and what there is not. The last list is a scatter gather list. Neither kind is to be
 * taken for the other: two addresses would be a descriptor of more memory than a page.
 */
static void fill_lists(void)
{
	int list, slot;

	for (list = 0; list < LIST_COUNT - 1; list++) {
		uint64_t *entries = page(LISTS + list);

		for (slot = 0; slot < 511; slot++)
			entries[slot] = htole64(below(8) ? data_page() : absurd());
		/* Lists that lead to lists, and to themselves. */
		entries[511] = htole64(physical[LISTS + below(LIST_COUNT - 1)]);
	}
	fill_scatter_list();
}

/* A read, or write, of some blocks that are the program's. */
static struct command transfer(uint8_t opcode, unsigned int blocks, uint64_t first, uint64_t second)
{
	struct command command = {
		.opcode = opcode,
		.nsid = 1,
		.data = { first, second },
		.dword = { below(BLOCKS_USED - 256), 0, blocks - 1 },
	};

	return command;
}

/* Blocks whose bytes lead nowhere if they are taken for addresses. */
static void fill_blocks(struct queue *queue)
{
	uint64_t *list = page(LISTS);
	unsigned int lba, slot;

	for (slot = 0; slot < 15; slot++)
		list[slot] = htole64(physical[DATA + 1]);
	memset(page(DATA), 0xff, PAGE);
	memset(page(DATA + 1), 0xff, PAGE);
	for (lba = 0; lba < BLOCKS_USED; lba += 8) {
		struct command command = transfer(1, 8, physical[DATA], 0);

		command.dword[0] = lba;
		/* With blocks of 4 KiB this is eight pages: hence the list. */
		command.data[1] = physical[LISTS];
		if (execute(queue, &command))
			break;
	}
}

static void attack_registers(unsigned int rounds)
{
	while (rounds--) {
		const unsigned int offset = below(BAR_BYTES / 8) * 8;
		const uint64_t value = next() >> below(64);

		/* Whatever is enabled in this way has its queues where there is nothing. */
		set_quad(ASQ, absurd());
		set_quad(ACQ, absurd());
		if (offset == (ASQ & ~7U) || offset == (ACQ & ~7U) || offset == (AQA & ~7U))
			continue;
		switch (below(4)) {
		case 0:
			*(volatile uint64_t *)(bar + offset) = value;
			break;
		case 1:
			*(volatile uint32_t *)(bar + offset + 4 * below(2)) = value;
			break;
		case 2:
			*(volatile uint16_t *)(bar + offset + 2 * below(4)) = value;
			break;
		default:
			*(volatile uint8_t *)(bar + offset + below(8)) = value;
		}
		(void)*(volatile uint64_t *)(bar + offset);
	}
	disable();
	printf("registers\n");
}

static void attack_admin_queues(unsigned int rounds)
{
	while (rounds--) {
		const uint64_t places[] = {
			absurd(), physical[ADMIN_SQ], physical[ADMIN_CQ], bar_address + DOORBELLS,
		};

		disable();
		memset(page(ADMIN_SQ), 0, PAGE);
		set(AQA, (uint32_t)next() % ENTRIES << 16 | below(ENTRIES));
		/* Queues over each other, over doorbells, and nowhere. */
		set_quad(ASQ, places[below(4)]);
		set_quad(ACQ, places[below(4)]);
		set(CC, ENABLED | (below(4) ? 0 : (uint32_t)next() & 0x3ff0));
		wait_for(READY, READY);
		set(DOORBELLS, below(2) ? 1 + below(8) : (uint32_t)next());
		set(DOORBELLS + 4, (uint32_t)next());
		usleep(below(500));
	}
	disable();
	printf("queues over themselves, over doorbells, and outside of memory\n");
}

/* Commands of every kind whose data is nowhere, or in lists without an end. */
static void attack_pointers(unsigned int rounds)
{
	struct queue admin = enable();
	struct queue io = create(&admin);
	unsigned int refused = 0, round;

	fill_blocks(&io);
	fill_lists();
	for (round = 0; round < rounds; round++) {
		struct command command = transfer(1 + below(2), 256, data_page(), 0);
		int status;

		switch (below(4)) {
		case 0:
			command = transfer(1 + below(2), 1 + below(16), absurd(), absurd());
			break;
		case 1:
			command.data[1] = absurd();
			break;
		case 2:
			/* A list that begins with its last entries, which lead to further ones. */
			command.data[1] = physical[LISTS + below(LIST_COUNT - 1)] + 8 * (496 + below(16));
			break;
		default:
			fill_scatter_list();
			command.flags = 0x40;
			write_random_descriptor((uint8_t *)command.data);
		}
		status = execute(&io, &command);
		if (status < 0)
			fail("no answer to a command with a bad pointer, CSTS %#x", get(CSTS));
		refused += status != 0;
		if (round % 64 == 63)
			fill_lists();
	}
	disable();
	printf("%u of %u pointers refused\n", refused, rounds);
}

static void random_command(struct command *command)
{
	static const uint8_t opcodes[] = { 0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 0x0d, 0x10, 0x7c, 0x80, 0x84 };
	uint8_t *bytes = (uint8_t *)command;
	unsigned int i;

	for (i = 0; i < sizeof(*command); i++)
		bytes[i] = next();
	command->opcode = below(4) ? opcodes[below(sizeof(opcodes))] : next();
	command->flags = below(4) ? 0 : next() & 0xc3;
	command->nsid = below(4) ? 1 : next();
	command->data[0] = below(4) ? data_page() : absurd();
	command->data[1] = below(4) ? data_page() : absurd();
	if (!below(3))
		command->data[1] = physical[LISTS + below(LIST_COUNT - 1)];
	if (command->flags & 0xc0)
		write_random_descriptor((uint8_t *)command->data);
}

/* A queue whose entries are what lies in memory must lie in a page of the program. */
static void bound_queue(struct command *command)
{
	if (command->opcode != 1 && command->opcode != 5)
		return;
	command->dword[0] = (uint32_t)below(ENTRIES) << 16 | below(32);
	command->data[0] = below(2) ? physical[below(2) ? IO_SQ : IO_CQ] : absurd();
}

static void random_io(struct command *command)
{
	random_command(command);
	/* Blocks that are the program's, or none. */
	command->dword[0] = below(BLOCKS_USED - 256);
	command->dword[1] = below(8) ? 0 : next();
	command->dword[2] &= ~0xff00U;
}

/* Answers of the admin queue are not to become lists. */
static void random_admin(struct command *command)
{
	random_command(command);
	command->flags &= 3;
	if (command->opcode == 2 || command->opcode == 6 || command->opcode == 10) {
		command->data[0] = below(4) ? physical[ANSWERS] : absurd();
		command->data[1] = absurd();
	}
	if (command->opcode == 0x7c) {
		command->data[0] = below(2) ? physical[SHADOW] : absurd();
		command->data[1] = below(2) ? physical[EVENTS] : absurd();
	}
	bound_queue(command);
}

static void attack_commands(unsigned int rounds)
{
	struct queue admin = enable();
	struct queue io = create(&admin);
	unsigned int round;

	fill_blocks(&io);
	fill_lists();
	for (round = 0; round < rounds; round++) {
		struct command command;
		unsigned int burst = 1 + below(32);

		while (burst--) {
			if (below(4)) {
				random_io(&command);
				push(&io, &command);
			} else {
				random_admin(&command);
				push(&admin, &command);
			}
		}
		ring(&io);
		ring(&admin);
		drain(&io, 0.002, ENTRIES);
		drain(&admin, 0.002, ENTRIES);
		if (!below(8)) {
			/* Doorbells that say anything. */
			set(DOORBELLS + 4 * below(16), below(2) ? below(ENTRIES) : (uint32_t)next());
			((uint32_t *)page(SHADOW))[below(16)] = below(2) ? below(ENTRIES) : next();
		}
		if (get(CSTS) & FATAL || !below(64)) {
			/* In the middle of what has been begun. */
			memset(page(SHADOW), 0, PAGE);
			admin = enable();
			io = create(&admin);
			fill_lists();
		}
	}
	disable();
	printf("random commands\n");
}

/* Nowhere, and not in the controller's own BAR, which a VMM may take for memory. */
static uint64_t no_memory(void)
{
	uint64_t address;

	do
		address = absurd();
	while (address - bar_address < BAR_BYTES);
	return address;
}

static void attack_doorbell_buffers(unsigned int rounds)
{
	struct queue admin = enable();
	struct command command = { .opcode = 0x7c };
	unsigned int refused = 0, round;
	int status;

	for (round = 0; round < rounds; round++) {
		command.data[0] = no_memory();
		command.data[1] = below(2) ? no_memory() : physical[EVENTS];
		status = execute(&admin, &command);
		if (status < 0)
			fail("no answer to Doorbell Buffer Config");
		refused += status != 0;
	}
	if (refused != rounds)
		fail("%u of %u doorbell buffers outside of memory were taken", rounds - refused, rounds);
	disable();
	printf("doorbell buffers\n");
}

/* Function-level resets in the middle of transfers. */
static void attack_reset(int reset, unsigned int rounds)
{
	while (rounds--) {
		struct queue admin = enable();
		struct queue io = create(&admin);
		unsigned int burst = ENTRIES - 1;

		while (burst--) {
			const struct command command = transfer(2, 8, data_page(), data_page());

			push(&io, &command);
		}
		ring(&io);
		check(pwrite(reset, "1", 1, 0) == 1, "reset");
		wait_for(READY | FATAL, 0);
		/* Nothing arrives any more. */
		memset(page(IO_CQ), 0xa5, PAGE);
		memset(page(DATA), 0xa5, DATA_COUNT * PAGE);
		usleep(2000);
		while (++burst < DATA_COUNT * PAGE) {
			if (((uint8_t *)page(DATA))[burst] != 0xa5)
				fail("memory is written after a reset");
		}
	}
	printf("resets\n");
}

static void attack_configuration(int config, unsigned int rounds)
{
	const uint32_t low[] = { 0, 0xffffffffU, 0xfffff000U, 0xfee00000U, 0x100000U, 0xfec00000U };
	const uint32_t command = config_read(config, 4);
	const uint32_t bars[] = { config_read(config, 0x10), config_read(config, 0x14) };
	unsigned int at, round;

	for (round = 0; round < rounds; round++) {
		config_write(config, 4, (command & ~7U) | below(8));
		config_write(config, 0x10, low[below(6)]);
		config_write(config, 0x14, below(2) ? 0 : (uint32_t)next());
		(void)config_read(config, 0x10);
		/* Other BARs, the ROM, and what there is in front of capabilities. */
		config_write(config, 0x18 + 4 * below(7), (uint32_t)next());
	}
	config_write(config, 4, command & ~7U);
	for (at = 0x18; at <= 0x30; at += 4)
		config_write(config, at, 0);
	config_write(config, 0x10, bars[0]);
	config_write(config, 0x14, bars[1]);
	config_write(config, 4, command);
	if (get(CSTS) == 0xffffffffU)
		fail("registers are gone");
	disable();
	printf("absurd BARs\n");
}

/* Where memory ends, rounded up generously: everything that is listed but the windows of buses. */
static void find_end_of_memory(void)
{
	FILE *iomem = fopen("/proc/iomem", "r");
	unsigned long long first, last;
	char line[256];

	check(iomem != NULL, "iomem");
	while (fgets(line, sizeof(line), iomem)) {
		if (line[0] == ' ' || sscanf(line, "%llx-%llx", &first, &last) != 2)
			continue;
		if (strstr(line, "System RAM") && last > beyond)
			beyond = last;
	}
	fclose(iomem);
	if (!beyond)
		fail("no memory is listed");
	/* Beyond the windows of buses, too. */
	beyond = (beyond | ((1ULL << 45) - 1)) + 1;
}

int main(int argc, char **argv)
{
	int config, enabler, reset, resource;
	unsigned int rounds;

	if (argc != 4) {
		fprintf(stderr, "usage: nvme_hostile PCI-ADDRESS SEED ROUNDS\n");
		return 2;
	}
	setvbuf(stdout, NULL, _IOLBF, 0);
	state = strtoull(argv[2], NULL, 0) * 0x9e3779b97f4a7c15ULL + 1;
	rounds = strtoul(argv[3], NULL, 0);

	lock_memory();
	find_end_of_memory();
	enabler = open_device(argv[1], "enable", O_WRONLY);
	check(write(enabler, "1", 1) == 1, "enable");
	config = open_device(argv[1], "config", O_RDWR | O_SYNC);
	config_write(config, 4, config_read(config, 4) | 6);
	bar_address = config_read(config, 0x10) & ~0xfULL;
	bar_address |= (uint64_t)config_read(config, 0x14) << 32;
	resource = open_device(argv[1], "resource0", O_RDWR | O_SYNC);
	bar = mmap(NULL, BAR_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, resource, 0);
	check(bar != MAP_FAILED, "resource0");

	attack_registers(rounds);
	attack_admin_queues(rounds / 16 + 1);
	attack_pointers(rounds / 4 + 1);
	attack_doorbell_buffers(rounds / 16 + 1);
	attack_commands(rounds / 4 + 1);
	reset = open_device(argv[1], "reset", O_WRONLY);
	attack_reset(reset, rounds / 64 + 1);
	attack_configuration(config, rounds / 16 + 1);

	/* It works as before. */
	enable();
	disable();
	config_write(config, 4, config_read(config, 4) & ~4U);
	check(write(enabler, "0", 1) == 1, "disable");
	printf("survived %lu commands, %lu answers\n", commands, answers);
	return 0;
}
