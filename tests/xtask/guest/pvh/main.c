// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * A guest for VMMs on whose KVM no stock kernel boots: it finds its devices, starts them, says "ready", and does what the host
 * asks for by lines on the serial port. Each line is answered by one that begins with "ok" or "bad".
 */
#include "devices.h"

#define NVME_CLASS 0x010802

static struct virtio_device devices[PCI_SLOTS];

static bool begin(unsigned int slot)
{
	struct virtio_device *device = &devices[slot];
	uint32_t class = pci_read(slot, PCI_CLASS) >> 8;
	bool works = true;

	if (class == NVME_CLASS) {
		works = nvme_start(slot);
		if (works)
			say("device nvme slot %u", slot);
		return works;
	}
	if (!virtio_find(device, slot))
		return true;
	if (device->type == TYPE_BLOCK)
		works = blk_start(device);
	else if (device->type == TYPE_NET)
		works = net_start(device);
	else if (device->type == TYPE_FARLANE)
		works = farlane_start(device);
	else
		return true;
	if (works)
		say("device virtio-%u slot %u queues %u features 0x%lx", device->type, slot, device->queue_count,
		    device->features);
	return works;
}

/* Whether a line is this word, with a number behind it or none. */
static bool is(const char *line, const char *word, uint64_t *number)
{
	while (*word)
		if (*line++ != *word++)
			return false;
	*number = 0;
	if (!*line)
		return true;
	if (*line++ != ' ')
		return false;
	for (; *line; line++)
		*number = *number * 10 + (uint64_t)(*line - '0');
	return true;
}

static void perform(const char *line)
{
	static const struct {
		const char *word;
		void (*plain)(void);
		void (*seeded)(uint64_t seed);
	} all[] = {
		{ "blk-begin", NULL, blk_begin },
		{ "blk-end", blk_end, NULL },
		{ "blk-write", NULL, blk_write },
		{ "blk-read", NULL, blk_read },
		{ "blk-flush", blk_flush, NULL },
		{ "net-ask", net_ask, NULL },
		{ "net-settle", net_settle, NULL },
		{ "net-count", net_count, NULL },
		{ "rdma-begin", farlane_begin, NULL },
		{ "rdma-end", farlane_end, NULL },
		{ "nvme-identify", nvme_identify, NULL },
		{ "nvme-write", NULL, nvme_write },
		{ "nvme-read", NULL, nvme_read },
	};
	uint64_t number;

	if (is(line, "reboot", &number)) {
		say("ok rebooting");
		reboot();
	}
	for (unsigned int at = 0; at < sizeof(all) / sizeof(all[0]); at++)
		if (is(line, all[at].word, &number)) {
			if (all[at].plain)
				all[at].plain();
			else
				all[at].seeded(number);
			return;
		}
	say("bad what is `%s`?", line);
}

void main(void)
{
	char line[64];
	bool works = true;

	for (unsigned int slot = 0; slot < PCI_SLOTS && works; slot++)
		if (pci_read(slot, PCI_ID) != PCI_NOTHING)
			works = begin(slot);
	if (works)
		say("ready");
	for (;;) {
		net_poll();
		if (heard(line, sizeof(line)))
			perform(line);
	}
}
