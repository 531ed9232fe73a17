//! Two processes, two buffers: the client writes a pattern to the server's buffer, reads it back
//! and checks every byte; once asking how the transfer stands, once with a callback.
//!
//! ```text
//! transfer serve PORT SIZE
//! transfer HOST PORT SIZE
//! ```
//!
//! The TCP connection carries the descriptors, and a word each time that the two wait for each
//! other. The server checks its buffer at the end too. Speaks with the C example of the same name.
//! Exit status 0 means that all bytes were right.

use farlane::{Buffer, Descriptor, Direction, Endpoint, Library, RemoteBuffer, Status, Transfer};
use std::error::Error;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::ExitCode;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// A transfer that takes longer than this has been lost.
const PATIENCE: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match arguments[..] {
        ["serve", port, size] => serve(port, size),
        [host, port, size] => request(host, port, size),
        _ => Err("Use: transfer serve PORT SIZE, or transfer HOST PORT SIZE".into()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("transfer: {error}");
            ExitCode::FAILURE
        }
    }
}

fn serve(port: &str, size: &str) -> Result<()> {
    let listener = TcpListener::bind(("0.0.0.0", port.parse()?))?;
    println!("listening on port {}", listener.local_addr()?.port());
    let (mut stream, _) = listener.accept()?;
    let library = Library::open(None)?;
    let (buffer, _endpoint, _remote) = set_up(&library, &mut stream, size.parse()?)?;
    // The client has written twice, the second pattern last.
    meet_peer(&mut stream)?;
    check(&buffer, 2)?;
    meet_peer(&mut stream)?;
    println!("server: {} bytes right", buffer.length());
    Ok(())
}

fn request(host: &str, port: &str, size: &str) -> Result<()> {
    let mut stream = connect(host, port.parse()?)?;
    let library = Library::open(None)?;
    let (buffer, endpoint, remote) = set_up(&library, &mut stream, size.parse()?)?;

    polled(&library, &buffer, &endpoint, &remote)?;
    called_back(&library, &buffer, &endpoint, &remote)?;

    meet_peer(&mut stream)?;
    meet_peer(&mut stream)?;
    println!("client: {} bytes right", buffer.length());
    Ok(())
}

/// Makes a buffer and an endpoint, and connects it to the other process's.
fn set_up(
    library: &Library,
    stream: &mut TcpStream,
    size: usize,
) -> Result<(Arc<Buffer>, Arc<Endpoint>, RemoteBuffer)> {
    let buffer = library.allocate(size)?;
    println!(
        "buffer {}: {size} bytes, placement {:?}",
        buffer.id(),
        buffer.placement()
    );
    // Fresh memory costs a page fault a page, and the figures are to be those of the transfers.
    buffer.write(0, &vec![0; size])?;
    let endpoint = library.create_endpoint()?;
    stream.write_all(&endpoint.descriptor().bytes)?;
    stream.write_all(&buffer.descriptor().bytes)?;
    let remote_endpoint = receive(stream)?;
    let remote_buffer = receive(stream)?;
    endpoint.connect(&remote_endpoint)?;
    // Neither side starts before both are connected.
    meet_peer(stream)?;
    Ok((buffer, endpoint, RemoteBuffer::try_from(&remote_buffer)?))
}

/// Writes and reads back, asking how each transfer stands.
fn polled(
    library: &Library,
    buffer: &Arc<Buffer>,
    endpoint: &Arc<Endpoint>,
    remote: &RemoteBuffer,
) -> Result<()> {
    round("polling", buffer, 1, |direction| {
        let id = endpoint.start(&whole(direction, buffer, remote))?;
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            match library.query(id)? {
                Status::Pending => {}
                Status::Finished(outcome) => return Ok(outcome?),
            }
        }
        Err("A transfer was lost".into())
    })
}

/// Writes and reads back, learning from a callback when each transfer has finished.
fn called_back(
    library: &Library,
    buffer: &Arc<Buffer>,
    endpoint: &Arc<Endpoint>,
    remote: &RemoteBuffer,
) -> Result<()> {
    library.start_dispatcher()?;
    round("callback", buffer, 2, |direction| {
        let (sender, receiver) = mpsc::channel();
        let transfer = whole(direction, buffer, remote);
        let id = endpoint.start_with(&transfer, move |id, outcome| {
            let _ = sender.send((id, outcome));
        })?;
        let (finished, outcome) = receiver.recv_timeout(PATIENCE)?;
        if finished != id {
            return Err("The callback named another transfer".into());
        }
        Ok(outcome?)
    })
}

/// Writes pattern `seed` to the peer, wipes the buffer, reads it back and checks it. `transfer`
/// runs one transfer to its end.
fn round(
    name: &str,
    buffer: &Arc<Buffer>,
    seed: u64,
    transfer: impl Fn(Direction) -> Result<()>,
) -> Result<()> {
    fill(buffer, seed)?;
    let start = Instant::now();
    transfer(Direction::Write)?;
    let written = start.elapsed();
    buffer.write(0, &vec![0; buffer.length()])?;
    let start = Instant::now();
    transfer(Direction::Read)?;
    let read = start.elapsed();
    check(buffer, seed)?;
    println!(
        "{name}: write {:.0} MB/s, read {:.0} MB/s",
        rate(buffer, written),
        rate(buffer, read)
    );
    Ok(())
}

fn whole<'a>(
    direction: Direction,
    local: &'a Arc<Buffer>,
    remote: &'a RemoteBuffer,
) -> Transfer<'a> {
    Transfer {
        direction,
        local,
        local_offset: 0,
        remote,
        remote_offset: 0,
        length: local.length(),
    }
}

/// Megabytes in a second, a megabyte being 10^6 bytes.
fn rate(buffer: &Buffer, time: Duration) -> f64 {
    let megabytes = u32::try_from(buffer.length() / 1000).map_or(f64::MAX, f64::from) / 1000.0;
    megabytes / time.as_secs_f64()
}

/// The bytes of pattern `seed`: the words of a linear congruential generator (Knuth's MMIX).
fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let words = std::iter::successors(Some(seed), |word| {
        Some(
            word.wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407),
        )
    });
    words
        .skip(1)
        .flat_map(u64::to_le_bytes)
        .take(length)
        .collect()
}

fn fill(buffer: &Buffer, seed: u64) -> Result<()> {
    Ok(buffer.write(0, &pattern(seed, buffer.length()))?)
}

fn check(buffer: &Buffer, seed: u64) -> Result<()> {
    let mut found = vec![0; buffer.length()];
    buffer.read(0, &mut found)?;
    let wrong = found
        .iter()
        .zip(pattern(seed, buffer.length()))
        .position(|(&found, wanted)| found != wanted);
    match wrong {
        None => Ok(()),
        Some(at) => Err(format!("Byte {at} of {} is wrong", buffer.length()).into()),
    }
}

fn receive(stream: &mut TcpStream) -> Result<Descriptor> {
    let mut bytes = [0; 64];
    stream.read_exact(&mut bytes)?;
    Ok(Descriptor { bytes })
}

/// Tells the peer that this side is as far, and waits for the same word.
fn meet_peer(stream: &mut TcpStream) -> Result<()> {
    stream.write_all(b".")?;
    Ok(stream.read_exact(&mut [0])?)
}

/// Connects, giving a server that was started at the same time a few seconds.
fn connect(host: &str, port: u16) -> Result<TcpStream> {
    let start = Instant::now();
    loop {
        match TcpStream::connect((host, port)) {
            Err(error) if start.elapsed() > Duration::from_secs(10) => return Err(error.into()),
            Err(_) => std::thread::sleep(Duration::from_millis(100)),
            Ok(stream) => return Ok(stream),
        }
    }
}
