// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/* What virtio.h declares. */
#include "virtio.h"

/* Capabilities (4.1.4): what they are of. */
#define CAP_COMMON 1
#define CAP_NOTIFY 2
#define CAP_DEVICE 4

/* The common configuration (4.1.4.3). */
#define DEVICE_FEATURE_SELECT 0x00
#define DEVICE_FEATURE 0x04
#define DRIVER_FEATURE_SELECT 0x08
#define DRIVER_FEATURE 0x0c
#define NUM_QUEUES 0x12
#define DEVICE_STATUS 0x14
#define QUEUE_SELECT 0x16
#define QUEUE_SIZE 0x18
#define QUEUE_ENABLE 0x1c
#define QUEUE_NOTIFY_OFF 0x1e
#define QUEUE_DESC 0x20
#define QUEUE_DRIVER 0x28
#define QUEUE_DEVICE 0x30

/* The device status (2.1). */
#define ACKNOWLEDGE 1
#define DRIVER 2
#define DRIVER_OK 4
#define FEATURES_OK 8

#define DESC_NEXT 1
#define DESC_WRITE 2

/* What needs more of a driver: an IOMMU, packed queues, buffers used in order, data with notifications. */
#define NOT_TAKEN \
	(VIRTIO_BIT(33) | VIRTIO_BIT(34) | VIRTIO_BIT(35) | VIRTIO_BIT(38))

bool virtio_find(struct virtio_device *device, unsigned int slot)
{
	uint32_t id = pci_read(slot, PCI_ID);
	unsigned int at = pci_read(slot, PCI_CAPABILITIES) & 0xfc;

	if ((id & 0xffff) != VIRTIO_VENDOR || id >> 16 < VIRTIO_FIRST_ID)
		return false;
	memset(device, 0, sizeof(*device));
	device->slot = slot;
	device->type = (uint16_t)((id >> 16) - VIRTIO_FIRST_ID);
	pci_enable(slot);
	while (at) {
		uint32_t head = pci_read(slot, at);
		uint32_t bar = pci_read(slot, at + 4) & 0xff;
		uint32_t offset = pci_read(slot, at + 8);
		uint32_t length = pci_read(slot, at + 12);
		uint8_t of = (uint8_t)(head >> 24);

		if ((head & 0xff) == PCI_VENDOR_SPECIFIC &&
		    (of == CAP_COMMON || of == CAP_NOTIFY || of == CAP_DEVICE)) {
			char *seen = map_device(pci_bar(slot, bar) + offset, length);

			if (of == CAP_COMMON)
				device->common = seen;
			if (of == CAP_DEVICE)
				device->config = seen;
			if (of == CAP_NOTIFY) {
				device->notify = seen;
				device->notify_multiplier = pci_read(slot, at + 16);
			}
		}
		at = (head >> 8) & 0xfc;
	}
	return true;
}

static uint64_t offered(struct virtio_device *device)
{
	uint64_t features = 0;

	for (uint32_t half = 0; half < 2; half++) {
		write32(device->common + DEVICE_FEATURE_SELECT, half);
		features |= (uint64_t)read32(device->common + DEVICE_FEATURE) << (32 * half);
	}
	return features;
}

static void make_queue(struct virtio_device *device, uint16_t number)
{
	struct queue *queue = &device->queues[number];
	char *common = device->common;

	write16(common + QUEUE_SELECT, number);
	queue->number = number;
	queue->size = read16(common + QUEUE_SIZE);
	if (queue->size > VIRTIO_MAX_SIZE)
		queue->size = VIRTIO_MAX_SIZE;
	write16(common + QUEUE_SIZE, queue->size);
	queue->descriptors = buffers(sizeof(struct descriptor) * VIRTIO_MAX_SIZE);
	queue->available = pages(PAGE);
	queue->used = pages(PAGE);
	write64(common + QUEUE_DESC, address_of(queue->descriptors));
	write64(common + QUEUE_DRIVER, address_of(queue->available));
	write64(common + QUEUE_DEVICE, address_of(queue->used));
	queue->bell = device->notify + read16(common + QUEUE_NOTIFY_OFF) * device->notify_multiplier;
	write16(common + QUEUE_ENABLE, 1);
}

bool virtio_start(struct virtio_device *device)
{
	char *common = device->common;
	struct deadline deadline = deadline_from_now();

	if (!common || !device->notify) {
		say("bad device %u has no common configuration or no notifications", device->type);
		return false;
	}
	write8(common + DEVICE_STATUS, 0);
	while (read8(common + DEVICE_STATUS))
		if (is_over(&deadline)) {
			say("bad device %u does not come out of its reset", device->type);
			return false;
		}
	write8(common + DEVICE_STATUS, ACKNOWLEDGE | DRIVER);
	device->features = offered(device) & ~NOT_TAKEN;
	for (uint32_t half = 0; half < 2; half++) {
		write32(common + DRIVER_FEATURE_SELECT, half);
		write32(common + DRIVER_FEATURE, (uint32_t)(device->features >> (32 * half)));
	}
	write8(common + DEVICE_STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK);
	if (!(read8(common + DEVICE_STATUS) & FEATURES_OK)) {
		say("bad device %u refuses features 0x%lx", device->type, device->features);
		return false;
	}
	device->queue_count = read16(common + NUM_QUEUES);
	if (device->queue_count > VIRTIO_MAX_QUEUES) {
		say("bad device %u has %u queues", device->type, device->queue_count);
		return false;
	}
	for (uint16_t number = 0; number < device->queue_count; number++)
		make_queue(device, number);
	write8(common + DEVICE_STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
	if (read8(common + DEVICE_STATUS) != (ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK)) {
		say("bad device %u has status %u", device->type, read8(common + DEVICE_STATUS));
		return false;
	}
	return true;
}

void queue_post(struct queue *queue, uint16_t head, const struct buffer *buffers, unsigned int count)
{
	for (unsigned int at = 0; at < count; at++) {
		volatile struct descriptor *to = &queue->descriptors[head + at];

		to->address = address_of(buffers[at].memory);
		to->length = buffers[at].length;
		to->flags = (uint16_t)((at + 1 < count ? DESC_NEXT : 0) |
				       (buffers[at].device_writes ? DESC_WRITE : 0));
		to->next = (uint16_t)(head + at + 1);
	}
	queue->available[2 + queue->posted % queue->size] = head;
	fence();
	queue->posted++;
	queue->available[1] = queue->posted;
	fence();
	write16(queue->bell, queue->number);
}

bool queue_used(struct queue *queue, struct used_element *element)
{
	volatile struct used_element *elements = (volatile struct used_element *)(queue->used + 2);

	fence();
	if (queue->seen == queue->used[1])
		return false;
	fence();
	element->head = elements[queue->seen % queue->size].head;
	element->length = elements[queue->seen % queue->size].length;
	queue->seen++;
	return true;
}
