use super::*;
use farlane_rdma_remoting::ServerConfig;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};

/// A host socket, which is served by the test's thread, and where it is.
struct Rig {
    host: HostSocket,
    address: SocketAddrUnix,
    _folder: tempfile::TempDir,
}

fn socket() -> OwnedFd {
    rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap()
}

impl Rig {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let address = SocketAddrUnix::new(folder.path().join("host")).unwrap();
        let listener = socket();
        rustix::net::bind(&listener, &address).unwrap();
        rustix::net::listen(&listener, 8).unwrap();
        let server = Server::new(ServerConfig::default()).unwrap();
        let port = server.port([1; 16], "host".to_owned()).unwrap();
        Self {
            host: HostSocket::new(listener, port, server, None, Arc::default()).unwrap(),
            address,
            _folder: folder,
        }
    }

    /// A process connects.
    fn connect(&mut self) -> OwnedFd {
        let client = socket();
        rustix::net::connect(&client, &self.address).unwrap();
        self.host.accept().unwrap();
        client
    }
}

#[test]
fn a_process_has_no_more_than_its_share_of_connections() {
    let mut rig = Rig::new();
    let mut clients: Vec<_> = (0..MAX_OF_PROCESS).map(|_| rig.connect()).collect();
    assert_eq!(rig.host.connections.len(), MAX_OF_PROCESS);
    rig.connect();
    assert_eq!(rig.host.connections.len(), MAX_OF_PROCESS);
    // It has one less, and can have another.
    clients.pop();
    let number = *rig.host.connections.keys().next_back().unwrap();
    rig.host.serve(number);
    assert_eq!(rig.host.connections.len(), MAX_OF_PROCESS - 1);
    clients.push(rig.connect());
    assert_eq!(rig.host.connections.len(), MAX_OF_PROCESS);
}
