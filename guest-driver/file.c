// SPDX-License-Identifier: GPL-2.0
/* Files that a process has open, which the backend tells from each other. */
#include <linux/file.h>
#include <linux/magic.h>

#include "farlane.h"

/*
 * Whether a context may hold the file. Files of other kinds may hold this context's (a socket what
 * is in flight, io_uring what is registered), and neither would ever go.
 */
static bool farlane_is_plain(const struct inode *inode)
{
	const struct super_block *sb = inode->i_sb;

	return S_ISREG(inode->i_mode) &&
	       (!(sb->s_flags & SB_NOUSER) || sb->s_magic == TMPFS_MAGIC);
}

/*
 * Shows the backend a file: by the address of its inode, which no other one has while the file is
 * open, and which is a secret of this device's.
 */
int farlane_file(struct farlane_context *ctx, struct farlane_file *arg)
{
	struct farlane_region *region;
	struct file *file;
	u64 number;
	int err;

	file = fget(arg->fd);
	if (!file)
		return -EBADF;
	err = -EINVAL;
	if (!farlane_is_plain(file_inode(file)))
		goto put;
	err = -ENOSPC;
	if (!atomic_add_unless(&ctx->files, 1, FARLANE_MAX_FILES))
		goto put;
	number = (unsigned long)file_inode(file) ^ ctx->fl->file_secret;
	region = farlane_region_new(FARLANE_KIND_FILE, 0, number, 0);
	if (!region) {
		err = -ENOMEM;
		goto give;
	}
	region->file = file;
	err = farlane_attach(ctx, region);
	if (err)
		return err;
	arg->region = region->id;
	farlane_region_live(ctx, region);
	return 0;

give:
	atomic_dec(&ctx->files);
put:
	fput(file);
	return err;
}

/* The region goes, and the backend knows it no more. */
void farlane_file_free(struct farlane_context *ctx, struct file *file)
{
	fput(file);
	atomic_dec(&ctx->files);
}
