// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/* An NVMe controller (NVM Express 1.4) with one pair of I/O queues, which are polled. */
#include "devices.h"

/* Registers (3.1). */
#define CAP 0x00
#define CC 0x14
#define CSTS 0x1c
#define AQA 0x24
#define ASQ 0x28
#define ACQ 0x30
#define DOORBELLS 0x1000
#define BAR_BYTES 0x4000

#define CC_ENABLE 1
#define CC_ENTRIES (6 << 16 | 4 << 20)
#define CSTS_READY 1

#define ADMIN_CREATE_SQ 0x01
#define ADMIN_CREATE_CQ 0x05
#define ADMIN_IDENTIFY 0x06
#define NVM_FLUSH 0x00
#define NVM_WRITE 0x01
#define NVM_READ 0x02

#define IDENTIFY_NAMESPACE 0
#define IDENTIFY_CONTROLLER 1
#define SERIAL_AT 4
#define SERIAL_BYTES 20

#define DEPTH 16
#define ADMIN 0
#define IO 1
#define TRANSFERS 16

struct command {
	uint32_t opcode; /* and the identifier above it */
	uint32_t namespace;
	uint64_t reserved, metadata;
	uint64_t prp1, prp2;
	uint32_t cdw10, cdw11, cdw12, cdw13, cdw14, cdw15;
};

struct completion {
	uint32_t result, reserved, heads, status; /* identifier, phase, status */
};

struct nvme_queue {
	struct command *commands;
	volatile struct completion *completions;
	uint16_t tail, head, phase;
};

static char *registers;
static struct nvme_queue queues[2];
static char *data;
static uint32_t block_bytes;
static char serial[SERIAL_BYTES + 1];

static void make(struct nvme_queue *queue)
{
	queue->commands = buffers(DEPTH * sizeof(struct command));
	queue->completions = pages(DEPTH * sizeof(struct completion));
	queue->phase = 1;
}

/* Carries out one command on a queue. Says why not. */
static bool carry_out(unsigned int number, struct command command, const char *what)
{
	struct nvme_queue *queue = &queues[number];
	volatile struct completion *completion = &queue->completions[queue->head];
	struct deadline deadline = deadline_from_now();
	uint16_t id = queue->tail;
	uint32_t status;

	command.opcode |= (uint32_t)id << 16;
	queue->commands[queue->tail] = command;
	fence();
	queue->tail = (uint16_t)((queue->tail + 1) % DEPTH);
	write32(registers + DOORBELLS + 8 * number, queue->tail);
	while ((completion->status >> 16 & 1) != queue->phase)
		if (is_over(&deadline)) {
			say("bad nvme: %s is not completed; status register 0x%lx", what,
			    (unsigned long)read32(registers + CSTS));
			return false;
		}
	fence();
	status = completion->status;
	queue->head = (uint16_t)((queue->head + 1) % DEPTH);
	if (!queue->head)
		queue->phase ^= 1;
	write32(registers + DOORBELLS + 8 * number + 4, queue->head);
	if (status >> 17 || (status & 0xffff) != id) {
		say("bad nvme: %s: command %u is completed as %u with status 0x%lx", what, id, status & 0xffff,
		    (unsigned long)(status >> 17));
		return false;
	}
	return true;
}

static bool wait_ready(uint32_t ready)
{
	struct deadline deadline = deadline_from_now();

	while ((read32(registers + CSTS) & CSTS_READY) != ready)
		if (is_over(&deadline)) {
			say("bad nvme: status register 0x%lx", (unsigned long)read32(registers + CSTS));
			return false;
		}
	return true;
}

static bool identify(uint32_t namespace, uint32_t cns)
{
	memset(data, 0xee, PAGE);
	return carry_out(ADMIN, (struct command){
		.opcode = ADMIN_IDENTIFY,
		.namespace = namespace,
		.prp1 = address_of(data),
		.cdw10 = cns,
	}, "Identify");
}

static bool identify_all(void)
{
	uint8_t format;

	if (!identify(0, IDENTIFY_CONTROLLER))
		return false;
	memcpy(serial, data + SERIAL_AT, SERIAL_BYTES);
	for (int at = SERIAL_BYTES - 1; at >= 0 && serial[at] == ' '; at--)
		serial[at] = 0;
	if (!identify(1, IDENTIFY_NAMESPACE))
		return false;
	/* The current format, and the power of two of its blocks. */
	format = (uint8_t)data[26] & 0xf;
	block_bytes = 1U << (uint8_t)data[128 + 4 * format + 2];
	return true;
}

bool nvme_start(unsigned int slot)
{
	struct nvme_queue *admin = &queues[ADMIN], *io = &queues[IO];

	pci_enable(slot);
	registers = map_device(pci_bar(slot, 0), BAR_BYTES);
	data = buffers(PAGE);
	make(admin);
	make(io);
	write32(registers + CC, 0);
	if (!wait_ready(0))
		return false;
	write32(registers + AQA, (DEPTH - 1) << 16 | (DEPTH - 1));
	write64(registers + ASQ, address_of(admin->commands));
	write64(registers + ACQ, address_of(admin->completions));
	write32(registers + CC, CC_ENTRIES | CC_ENABLE);
	if (!wait_ready(CSTS_READY) || !identify_all())
		return false;
	return carry_out(ADMIN, (struct command){
		.opcode = ADMIN_CREATE_CQ,
		.prp1 = address_of(io->completions),
		.cdw10 = (DEPTH - 1) << 16 | IO,
		.cdw11 = 1,
	}, "Create I/O Completion Queue") && carry_out(ADMIN, (struct command){
		.opcode = ADMIN_CREATE_SQ,
		.prp1 = address_of(io->commands),
		.cdw10 = (DEPTH - 1) << 16 | IO,
		.cdw11 = IO << 16 | 1,
	}, "Create I/O Submission Queue");
}

static bool is_there(void)
{
	if (!registers)
		say("bad there is no NVMe controller");
	return registers;
}

void nvme_identify(void)
{
	if (is_there() && identify_all())
		say("ok serial %s, blocks of %u bytes", serial, block_bytes);
}

static bool transfer(uint32_t opcode, uint64_t offset, const char *what)
{
	uint64_t block = offset / block_bytes;

	return carry_out(IO, (struct command){
		.opcode = opcode,
		.namespace = 1,
		.prp1 = address_of(data),
		.cdw10 = (uint32_t)block,
		.cdw11 = (uint32_t)(block >> 32),
		.cdw12 = PAGE / block_bytes - 1,
	}, what);
}

void nvme_write(uint64_t seed)
{
	if (!is_there())
		return;
	for (uint64_t offset = 0; offset < TRANSFERS * PAGE; offset += PAGE) {
		fill(data, PAGE, seed, offset);
		if (!transfer(NVM_WRITE, offset, "Write"))
			return;
	}
	if (carry_out(IO, (struct command){ .opcode = NVM_FLUSH, .namespace = 1 }, "Flush"))
		say("ok %u writes and a flush", TRANSFERS);
}

void nvme_read(uint64_t seed)
{
	if (!is_there())
		return;
	for (uint64_t offset = 0; offset < TRANSFERS * PAGE; offset += PAGE) {
		uint64_t at;

		memset(data, 0xee, PAGE);
		if (!transfer(NVM_READ, offset, "Read"))
			return;
		at = differs_at(data, PAGE, seed, offset);
		if (at < PAGE) {
			say("bad nvme: 0x%lx is not what was written", offset + at);
			return;
		}
	}
	say("ok %u reads are what was written", TRANSFERS);
}
