//! Buffers: here and at the peer.

use crate::descriptor::{BufferAddress, Descriptor};
use crate::instance::Instance;
use crate::{Error, Id};
use farlane_rdma_client::abi::rdma::{ACCESS_LOCAL_WRITE, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE};
use farlane_rdma_client::{Mr, Placement};
use std::ptr::NonNull;
use std::sync::Arc;

/// A buffer of this process, which its peers can name and reach.
#[derive(Debug)]
pub struct Buffer {
    id: Id,
    // Ends before the memory goes.
    registration: Mr,
    memory: farlane_rdma_client::Buffer,
    length: usize,
    instance: Arc<Instance>,
}

impl Buffer {
    pub(crate) fn allocate(instance: &Arc<Instance>, length: usize) -> Result<Arc<Self>, Error> {
        let memory = farlane_rdma_client::Buffer::allocate(&instance.context, length)?;
        let access = ACCESS_LOCAL_WRITE | ACCESS_REMOTE_READ | ACCESS_REMOTE_WRITE;
        let address = memory.address();
        // SAFETY: the memory lives as long as the registration over it, and is accessed through
        // raw copies only.
        let registration =
            unsafe { Mr::register(&instance.pd, address, length, address as u64, access)? };
        let buffer = Arc::new(Self {
            id: instance.next_id(),
            registration,
            memory,
            length,
            instance: Arc::clone(instance),
        });
        instance
            .objects()
            .buffers
            .insert(buffer.id, Arc::downgrade(&buffer));
        Ok(buffer)
    }

    /// Id, unique in the library.
    #[must_use]
    pub fn id(&self) -> Id {
        self.id
    }

    /// Where its memory lies.
    #[must_use]
    pub fn placement(&self) -> Placement {
        self.memory.placement()
    }

    /// Length in bytes, as asked for.
    #[must_use]
    pub fn length(&self) -> usize {
        self.length
    }

    /// The first byte. Peers change the memory at any time, so make no references into it.
    #[must_use]
    pub fn base(&self) -> NonNull<u8> {
        self.memory.base()
    }

    /// What a peer must be told to reach this buffer.
    #[must_use]
    pub fn descriptor(&self) -> Descriptor {
        BufferAddress {
            gid: self.instance.gid,
            rkey: self.registration.rkey(),
            address: self.memory.address() as u64,
            length: self.length as u64,
        }
        .into()
    }

    /// Copies `from` into the buffer.
    ///
    /// # Errors
    /// When it does not fit.
    pub fn write(&self, offset: usize, from: &[u8]) -> Result<(), Error> {
        check(offset as u64, from.len() as u64, self.length as u64)?;
        // SAFETY: in bounds. Programs that copy from several threads at a time get a mixture of
        // the bytes, as from several peers at a time: this memory has no other meaning.
        unsafe { self.memory.map().write_bytes(offset, from) };
        Ok(())
    }

    /// Copies out of the buffer.
    ///
    /// # Errors
    /// When the buffer ends before.
    pub fn read(&self, offset: usize, to: &mut [u8]) -> Result<(), Error> {
        check(offset as u64, to.len() as u64, self.length as u64)?;
        // SAFETY: as in `write`.
        unsafe { self.memory.map().read_bytes(offset, to) };
        Ok(())
    }

    /// The address of bytes of it that a transfer names, and the key to them.
    pub(crate) fn locate(&self, offset: usize, length: usize) -> Result<(u64, u32), Error> {
        check(offset as u64, length as u64, self.length as u64)?;
        let address = self.memory.address() + offset;
        Ok((address as u64, self.registration.lkey()))
    }

    pub(crate) fn belongs_to(&self, instance: &Arc<Instance>) -> bool {
        Arc::ptr_eq(&self.instance, instance)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.instance.objects().buffers.remove(&self.id);
    }
}

/// A buffer of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteBuffer(BufferAddress);

impl TryFrom<&Descriptor> for RemoteBuffer {
    type Error = Error;

    fn try_from(descriptor: &Descriptor) -> Result<Self, Error> {
        BufferAddress::try_from(descriptor).map(Self)
    }
}

impl RemoteBuffer {
    /// Length of the peer's buffer in bytes.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.0.length
    }

    /// The address of bytes of it that a transfer names, and the key to them.
    pub(crate) fn locate(&self, offset: u64, length: u64) -> Result<(u64, u32), Error> {
        check(offset, length, self.0.length)?;
        Ok((self.0.address + offset, self.0.rkey))
    }

    pub(crate) fn gid(&self) -> [u8; 16] {
        self.0.gid
    }
}

/// Whether `length` bytes at `offset` lie in a buffer.
fn check(offset: u64, length: u64, buffer: u64) -> Result<(), Error> {
    match offset.checked_add(length) {
        Some(end) if end <= buffer => Ok(()),
        _ => Err(Error::OutOfRange {
            offset,
            length,
            buffer,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_a_peers_buffer_are_found_up_to_its_end_and_not_beyond() {
        let remote = RemoteBuffer(BufferAddress {
            gid: [0; 16],
            rkey: 9,
            address: 0x1000,
            length: 100,
        });
        assert_eq!(remote.locate(40, 60).unwrap(), (0x1028, 9));
        assert!(matches!(
            remote.locate(41, 60),
            Err(Error::OutOfRange { .. })
        ));
        assert!(remote.locate(u64::MAX, 2).is_err());
    }
}
