//! The connection between lender and borrower.
//!
//! Messages ([`message`]) are encoded with postcard, one a frame. Over a UNIX socket a frame is a
//! packet and may carry descriptors; over TCP it is preceded by its length, and TLS lies beneath
//! wherever it leaves the host.

mod address;
mod connection;
pub mod message;
mod packet;
mod stream;
mod tls;

pub use address::{Address, AddressError};
pub(crate) use connection::HANDSHAKE;
pub use connection::{
    Acceptor, ConnectionError, Connector, Incoming, Peer, Received, Receiver, Sender, pair,
};
pub use tls::{TlsError, TlsIdentity};
