// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/* The Farlane device: what its configuration says, and PING, whose answer names the device's generation. */
#include <farlane_abi.h>

#include "devices.h"

static struct virtio_device *farlane;
static struct farlane_request *request;
static struct farlane_reply *reply;

bool farlane_start(struct virtio_device *device)
{
	uint32_t magic, version;

	if (!virtio_start(device))
		return false;
	if (device->queue_count != FARLANE_QUEUES) {
		say("bad the Farlane device has %u queues", device->queue_count);
		return false;
	}
	magic = read32(device->config + offsetof(struct farlane_config, magic));
	version = read32(device->config + offsetof(struct farlane_config, version));
	if (magic != FARLANE_MAGIC || version != FARLANE_ABI_VERSION) {
		say("bad the Farlane device has magic 0x%lx, version %u", (unsigned long)magic, version);
		return false;
	}
	request = pages(sizeof(*request));
	reply = pages(sizeof(*reply));
	farlane = device;
	return true;
}

void farlane_begin(void)
{
	struct buffer chain[] = {
		{ request, sizeof(*request), false },
		{ reply, sizeof(*reply), true },
	};

	if (!farlane) {
		say("bad there is no Farlane device");
		return;
	}
	if (queue_waiting(&farlane->queues[FARLANE_QUEUE_CONTROL])) {
		say("bad a request is under way");
		return;
	}
	memset(request, 0, sizeof(*request));
	memset(reply, 0xee, sizeof(*reply));
	request->op = FARLANE_OP_PING;
	queue_post(&farlane->queues[FARLANE_QUEUE_CONTROL], 0, chain, 2);
	say("ok asked");
}

static bool answered(void)
{
	struct queue *queue = &farlane->queues[FARLANE_QUEUE_CONTROL];
	struct deadline deadline = deadline_from_now();
	struct used_element element;

	while (!queue_used(queue, &element))
		if (is_over(&deadline)) {
			say("bad PING is not answered");
			return false;
		}
	if (element.head || element.length != sizeof(*reply) || reply->status || reply->reserved ||
	    queue_waiting(queue)) {
		say("bad PING is answered with status %u in %u bytes of chain %u, %u further ones", reply->status,
		    element.length, element.head, -queue_waiting(queue));
		return false;
	}
	return true;
}

void farlane_end(void)
{
	if (!farlane)
		say("bad there is no Farlane device");
	else if (answered())
		say("ok generation %lx", (unsigned long)reply->value);
}
