//! Buffers, transfers and callbacks: RDMA in the style of the API-remoting paper (section III-B),
//! over the same remoted calls as the verbs.
//!
//! A [`Library`] allocates [`Buffer`]s, in host memory where the device has a window, and makes
//! [`Endpoint`]s. Two processes exchange [`Descriptor`]s over any channel of theirs and connect
//! their endpoints; then each can start transfers between a buffer of its own and a buffer of the
//! other. Starting never blocks and returns an id. How a transfer went is learnt by asking
//! ([`Library::query`]) or from a callback, which runs in a thread of the library
//! ([`Library::start_dispatcher`]) or where the program calls [`Library::dispatch`].
//!
//! Buffers, endpoints and transfers have ids, unique in their library; [`Library::buffer`] and
//! [`Library::endpoint`] find an object by its id.
//!
//! `include/farlane.h` is the same for C.
//!
//! ```no_run
//! use farlane::{Descriptor, Direction, Library, RemoteBuffer, Status, Transfer};
//! # fn exchange(_: Descriptor) -> Descriptor { unimplemented!() }
//! let library = Library::open(None)?;
//! let buffer = library.allocate(1 << 20)?;
//! buffer.write(0, b"hello")?;
//! let endpoint = library.create_endpoint()?;
//! endpoint.connect(&exchange(endpoint.descriptor()))?;
//! let remote = RemoteBuffer::try_from(&exchange(buffer.descriptor()))?;
//! let transfer = endpoint.start(&Transfer {
//!     direction: Direction::Write,
//!     local: &buffer,
//!     local_offset: 0,
//!     remote: &remote,
//!     remote_offset: 0,
//!     length: 5,
//! })?;
//! while library.query(transfer)? == Status::Pending {}
//! # Ok::<(), farlane::Error>(())
//! ```

mod buffer;
mod c;
mod descriptor;
mod dispatch;
mod endpoint;
mod error;
mod instance;
mod library;
mod transfer;

pub use buffer::{Buffer, RemoteBuffer};
pub use descriptor::Descriptor;
pub use endpoint::{Direction, Endpoint, Transfer};
pub use error::{Error, TransferError};
pub use farlane_rdma_client::Placement;
pub use library::Library;
pub use transfer::{Outcome, Status};

/// The number of a buffer, an endpoint or a transfer, unique in its library and never zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Id(pub(crate) u64);

impl Id {
    /// The id as an integer, for a C interface.
    #[must_use]
    pub fn get(self) -> u64 {
        self.0
    }

    /// The id with this number, whether or not there is such an object.
    #[must_use]
    pub fn from_number(number: u64) -> Self {
        Self(number)
    }
}

impl std::fmt::Display for Id {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}
