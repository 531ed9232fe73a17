// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/* A virtio disk (virtio 1.2, 5.2): writes on all queues at once, each looked for when it is used, and read on other queues. */
#include "devices.h"

#define REQUEST_IN 0
#define REQUEST_OUT 1
#define REQUEST_FLUSH 4

#define STATUS_OK 0
#define STATUS_NONE 0xff

#define SECTOR 512
#define STRIDE (32UL << 10)
#define WRITES 16
#define CHAIN 3

struct request {
	struct {
		uint32_t type;
		uint32_t reserved;
		uint64_t sector;
	} header;
	volatile uint8_t status;
	bool under_way;
	char *data;
	uint32_t bytes;
	uint64_t offset;
};

static struct virtio_device *disk;
static struct request (*requests)[WRITES];
static unsigned int under_way;

uint64_t pattern(uint64_t seed, uint64_t offset)
{
	uint64_t word = (offset + 1) * 0x9e3779b97f4a7c15UL + seed * 0xd1b54a32d192ed03UL;

	return word ^ word >> 29;
}

void fill(void *memory, uint64_t bytes, uint64_t seed, uint64_t offset)
{
	uint64_t *words = memory;

	for (uint64_t at = 0; at < bytes / 8; at++)
		words[at] = pattern(seed, offset + 8 * at);
}

uint64_t differs_at(const void *memory, uint64_t bytes, uint64_t seed, uint64_t offset)
{
	const volatile uint64_t *words = memory;

	for (uint64_t at = 0; at < bytes / 8; at++)
		if (words[at] != pattern(seed, offset + 8 * at))
			return 8 * at;
	return bytes;
}

bool blk_start(struct virtio_device *device)
{
	if (!virtio_start(device))
		return false;
	for (unsigned int queue = 0; queue < device->queue_count; queue++)
		if (device->queues[queue].size < WRITES * CHAIN) {
			say("bad queue %u of the disk has %u entries", queue, device->queues[queue].size);
			return false;
		}
	disk = device;
	requests = pages(device->queue_count * sizeof(*requests));
	for (unsigned int queue = 0; queue < device->queue_count; queue++)
		for (unsigned int number = 0; number < WRITES; number++) {
			struct request *request = &requests[queue][number];

			request->data = buffers(STRIDE);
			request->bytes = 4096U << number % 4;
			request->offset = (queue * WRITES + number) * STRIDE;
		}
	return true;
}

static void post(unsigned int queue, unsigned int number, struct request *of, uint32_t type)
{
	struct request *request = &requests[queue][number];
	bool reads = type == REQUEST_IN;
	struct buffer chain[CHAIN] = {
		{ &request->header, sizeof(request->header), false },
		{ of->data, of->bytes, reads },
		{ &request->status, 1, true },
	};

	request->header.type = type;
	request->header.reserved = 0;
	request->header.sector = type == REQUEST_FLUSH ? 0 : of->offset / SECTOR;
	request->status = STATUS_NONE;
	request->under_way = true;
	under_way++;
	if (type == REQUEST_FLUSH)
		chain[1] = chain[2];
	queue_post(&disk->queues[queue], (uint16_t)(CHAIN * number), chain,
		   type == REQUEST_FLUSH ? 2 : CHAIN);
}

/* Waits until all requests were used, each once, and with success. */
static bool settle(const char *what)
{
	struct deadline deadline = deadline_from_now();
	struct used_element element;

	while (under_way) {
		for (unsigned int queue = 0; queue < disk->queue_count; queue++)
			while (queue_used(&disk->queues[queue], &element)) {
				struct request *request = &requests[queue][element.head / CHAIN % WRITES];

				if (element.head % CHAIN || element.head >= CHAIN * WRITES || !request->under_way) {
					say("bad %s: queue %u: %u was used and is not under way", what, queue, element.head);
					return false;
				}
				if (request->status != STATUS_OK) {
					say("bad %s: queue %u: %u has status %u", what, queue, element.head, request->status);
					return false;
				}
				request->under_way = false;
				under_way--;
			}
		if (under_way && is_over(&deadline)) {
			say("bad %s: %u requests are still under way", what, under_way);
			return false;
		}
	}
	for (unsigned int queue = 0; queue < disk->queue_count; queue++)
		if (queue_waiting(&disk->queues[queue])) {
			say("bad %s: queue %u is used further than it is available", what, queue);
			return false;
		}
	return true;
}

static bool is_idle(void)
{
	if (!disk)
		say("bad there is no disk");
	else if (under_way)
		say("bad %u requests are under way", under_way);
	return disk && !under_way;
}

static void begin(uint64_t seed)
{
	for (unsigned int number = 0; number < WRITES; number++)
		for (unsigned int queue = 0; queue < disk->queue_count; queue++) {
			struct request *request = &requests[queue][number];

			fill(request->data, request->bytes, seed, request->offset);
			post(queue, number, request, REQUEST_OUT);
		}
}

void blk_begin(uint64_t seed)
{
	if (!is_idle())
		return;
	begin(seed);
	say("ok %u writes are under way", under_way);
}

void blk_end(void)
{
	unsigned int count = under_way;

	if (!disk)
		say("bad there is no disk");
	else if (settle("write"))
		say("ok %u requests were done, each once", count);
}

void blk_write(uint64_t seed)
{
	if (!is_idle())
		return;
	begin(seed);
	blk_end();
}

void blk_read(uint64_t seed)
{
	uint64_t bytes = 0;

	if (!is_idle())
		return;
	for (unsigned int number = 0; number < WRITES; number++)
		for (unsigned int queue = 0; queue < disk->queue_count; queue++) {
			struct request *request = &requests[queue][number];

			memset(request->data, 0xee, request->bytes);
			post((queue + 1) % disk->queue_count, number, request, REQUEST_IN);
		}
	if (!settle("read"))
		return;
	for (unsigned int queue = 0; queue < disk->queue_count; queue++)
		for (unsigned int number = 0; number < WRITES; number++) {
			struct request *request = &requests[queue][number];
			uint64_t at = differs_at(request->data, request->bytes, seed, request->offset);

			if (at < request->bytes) {
				say("bad read: 0x%lx is not what was written", request->offset + at);
				return;
			}
			bytes += request->bytes;
		}
	say("ok %u KiB are what was written", (unsigned int)(bytes >> 10));
}

void blk_flush(void)
{
	if (!is_idle())
		return;
	post(0, 0, &requests[0][0], REQUEST_FLUSH);
	if (settle("flush"))
		say("ok flushed");
}
