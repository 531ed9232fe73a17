/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause */
/* Generated from zero-copy/abi; do not edit. See zero-copy/abi/src/header.rs. */
#ifndef FARLANE_ABI_H
#define FARLANE_ABI_H

#include <linux/types.h>
#include <linux/ioctl.h>
#ifdef __KERNEL__
#include <linux/stddef.h>
#include <linux/build_bug.h>
#else
#include <stddef.h>
#endif

#define FARLANE_VIRTIO_ID 0x26
#define FARLANE_MAGIC 0x4c524146
#define FARLANE_ABI_VERSION 0x4
#define FARLANE_QUEUE_CONTROL 0x0
#define FARLANE_QUEUE_EVENT 0x1
#define FARLANE_QUEUE_DOORBELL 0x2
#define FARLANE_QUEUES 0x3
#define FARLANE_QUEUE_SIZE 0x100
#define FARLANE_WINDOW_SHMEM_ID 0x0
#define FARLANE_FEATURE_WINDOW 0x1
#define FARLANE_FEATURE_TUNNEL 0x2
#define FARLANE_FEATURE_VERBS 0x4
#define FARLANE_OP_OPEN 0x1
#define FARLANE_OP_CLOSE 0x2
#define FARLANE_OP_ATTACH 0x3
#define FARLANE_OP_ATTACH_MORE 0x4
#define FARLANE_OP_DETACH 0x5
#define FARLANE_OP_WINDOW_MAP 0x6
#define FARLANE_OP_WINDOW_UNMAP 0x7
#define FARLANE_OP_PING 0x8
#define FARLANE_KIND_SEGMENT 0x1
#define FARLANE_KIND_PIN 0x2
#define FARLANE_KIND_DEVICE 0x3
#define FARLANE_KIND_FILE 0x6
#define FARLANE_FLAG_WRITABLE 0x1
#define FARLANE_FLAG_PHONY 0x2
#define FARLANE_MAX_EXTENTS_PER_REQUEST 0x3e8
#define FARLANE_MAX_REGION_BYTES 0x1000000000ULL
#define FARLANE_MAX_SEGMENT_BYTES 0x4000000
#define FARLANE_EVENT_WAKE 0x0
#define FARLANE_MAX_CONTEXTS 0x400
#define FARLANE_MAX_REGIONS 0x10000
#define FARLANE_MAX_FILES 0x200
#define FARLANE_MAX_EVENTS 0x400
#define FARLANE_OFF_DEAD 0x80
#define FARLANE_HEADER_SEGMENT_BYTES 0x8000
#define FARLANE_SEGMENT_SHIFT 0x1c
#define FARLANE_WINDOW_MMAP_BASE 0x1000000000000000ULL

struct farlane_config {
	__le32 magic;
	__le32 version;
	__le32 features;
	__le32 max_contexts;
	__le32 max_regions;
	__le32 max_events;
	__le64 window_bytes;
	__u8 gid[16];
	__le64 generation;
	__u8 mac[6];
	__u8 reserved[2];
};
_Static_assert(sizeof(struct farlane_config) == 64, "size");
_Static_assert(offsetof(struct farlane_config, magic) == 0, "offset");
_Static_assert(offsetof(struct farlane_config, version) == 4, "offset");
_Static_assert(offsetof(struct farlane_config, features) == 8, "offset");
_Static_assert(offsetof(struct farlane_config, max_contexts) == 12, "offset");
_Static_assert(offsetof(struct farlane_config, max_regions) == 16, "offset");
_Static_assert(offsetof(struct farlane_config, max_events) == 20, "offset");
_Static_assert(offsetof(struct farlane_config, window_bytes) == 24, "offset");
_Static_assert(offsetof(struct farlane_config, gid) == 32, "offset");
_Static_assert(offsetof(struct farlane_config, generation) == 48, "offset");
_Static_assert(offsetof(struct farlane_config, mac) == 56, "offset");
_Static_assert(offsetof(struct farlane_config, reserved) == 62, "offset");

struct farlane_request {
	__le32 op;
	__le32 context;
	__le32 region;
	__le32 kind;
	__le32 flags;
	__le32 extents;
	__le64 address;
	__le64 length;
};
_Static_assert(sizeof(struct farlane_request) == 40, "size");
_Static_assert(offsetof(struct farlane_request, op) == 0, "offset");
_Static_assert(offsetof(struct farlane_request, context) == 4, "offset");
_Static_assert(offsetof(struct farlane_request, region) == 8, "offset");
_Static_assert(offsetof(struct farlane_request, kind) == 12, "offset");
_Static_assert(offsetof(struct farlane_request, flags) == 16, "offset");
_Static_assert(offsetof(struct farlane_request, extents) == 20, "offset");
_Static_assert(offsetof(struct farlane_request, address) == 24, "offset");
_Static_assert(offsetof(struct farlane_request, length) == 32, "offset");

struct farlane_extent {
	__le64 address;
	__le64 length;
};
_Static_assert(sizeof(struct farlane_extent) == 16, "size");
_Static_assert(offsetof(struct farlane_extent, address) == 0, "offset");
_Static_assert(offsetof(struct farlane_extent, length) == 8, "offset");

struct farlane_reply {
	__le32 status;
	__le32 reserved;
	__le64 value;
};
_Static_assert(sizeof(struct farlane_reply) == 16, "size");
_Static_assert(offsetof(struct farlane_reply, status) == 0, "offset");
_Static_assert(offsetof(struct farlane_reply, reserved) == 4, "offset");
_Static_assert(offsetof(struct farlane_reply, value) == 8, "offset");

struct farlane_event {
	__le32 context;
	__le32 index;
};
_Static_assert(sizeof(struct farlane_event) == 8, "size");
_Static_assert(offsetof(struct farlane_event, context) == 0, "offset");
_Static_assert(offsetof(struct farlane_event, index) == 4, "offset");

struct farlane_info {
	__u32 version;
	__u32 context;
	__u32 features;
	__u32 reserved;
	__u64 window_bytes;
	__u8 gid[16];
};
_Static_assert(sizeof(struct farlane_info) == 40, "size");
_Static_assert(offsetof(struct farlane_info, version) == 0, "offset");
_Static_assert(offsetof(struct farlane_info, context) == 4, "offset");
_Static_assert(offsetof(struct farlane_info, features) == 8, "offset");
_Static_assert(offsetof(struct farlane_info, reserved) == 12, "offset");
_Static_assert(offsetof(struct farlane_info, window_bytes) == 16, "offset");
_Static_assert(offsetof(struct farlane_info, gid) == 24, "offset");

struct farlane_segment {
	__u64 length;
	__u64 mmap_offset;
	__u32 region;
	__u32 reserved;
};
_Static_assert(sizeof(struct farlane_segment) == 24, "size");
_Static_assert(offsetof(struct farlane_segment, length) == 0, "offset");
_Static_assert(offsetof(struct farlane_segment, mmap_offset) == 8, "offset");
_Static_assert(offsetof(struct farlane_segment, region) == 16, "offset");
_Static_assert(offsetof(struct farlane_segment, reserved) == 20, "offset");

struct farlane_pin {
	__u64 address;
	__u64 length;
	__u32 flags;
	__u32 region;
};
_Static_assert(sizeof(struct farlane_pin) == 24, "size");
_Static_assert(offsetof(struct farlane_pin, address) == 0, "offset");
_Static_assert(offsetof(struct farlane_pin, length) == 8, "offset");
_Static_assert(offsetof(struct farlane_pin, flags) == 16, "offset");
_Static_assert(offsetof(struct farlane_pin, region) == 20, "offset");

struct farlane_detach {
	__u32 region;
	__u32 reserved;
};
_Static_assert(sizeof(struct farlane_detach) == 8, "size");
_Static_assert(offsetof(struct farlane_detach, region) == 0, "offset");
_Static_assert(offsetof(struct farlane_detach, reserved) == 4, "offset");

struct farlane_file {
	__s32 fd;
	__u32 region;
};
_Static_assert(sizeof(struct farlane_file) == 8, "size");
_Static_assert(offsetof(struct farlane_file, fd) == 0, "offset");
_Static_assert(offsetof(struct farlane_file, region) == 4, "offset");

struct farlane_bind_event {
	__u32 index;
	__s32 fd;
};
_Static_assert(sizeof(struct farlane_bind_event) == 8, "size");
_Static_assert(offsetof(struct farlane_bind_event, index) == 0, "offset");
_Static_assert(offsetof(struct farlane_bind_event, fd) == 4, "offset");

#define FARLANE_IOC_INFO _IOR(0xfa, 1, struct farlane_info)
#define FARLANE_IOC_SEGMENT _IOWR(0xfa, 2, struct farlane_segment)
#define FARLANE_IOC_PIN _IOWR(0xfa, 3, struct farlane_pin)
#define FARLANE_IOC_DETACH _IOW(0xfa, 4, struct farlane_detach)
#define FARLANE_IOC_BIND_EVENT _IOW(0xfa, 5, struct farlane_bind_event)
#define FARLANE_IOC_DOORBELL _IO(0xfa, 6)
#define FARLANE_IOC_PIN_DEVICE _IOWR(0xfa, 7, struct farlane_pin)
#define FARLANE_IOC_FILE _IOWR(0xfa, 8, struct farlane_file)
_Static_assert(FARLANE_IOC_INFO == 0x8028fa01, "ioctl number");
_Static_assert(FARLANE_IOC_SEGMENT == 0xc018fa02, "ioctl number");
_Static_assert(FARLANE_IOC_PIN == 0xc018fa03, "ioctl number");
_Static_assert(FARLANE_IOC_DETACH == 0x4008fa04, "ioctl number");
_Static_assert(FARLANE_IOC_BIND_EVENT == 0x4008fa05, "ioctl number");
_Static_assert(FARLANE_IOC_DOORBELL == 0xfa06, "ioctl number");
_Static_assert(FARLANE_IOC_PIN_DEVICE == 0xc018fa07, "ioctl number");
_Static_assert(FARLANE_IOC_FILE == 0xc008fa08, "ioctl number");

#endif
