//! What the VM kit and the agent in its guests say to each other.
//!
//! Both ends of a virtio-serial port carry frames: a little-endian `u32` length, then that many
//! bytes of one [`Request`] (kit to agent) or [`Reply`] (agent to kit). A job is named by the
//! number that the kit chose for it.

use std::io::{self, Read, Write};

/// The name of the virtio-serial port in the guest.
pub const PORT_NAME: &str = "farlane.agent";

/// The longest frame either side accepts, in bytes.
pub const FRAME_MAX_BYTES: u32 = 1 << 20;

/// The most bytes of a file that one message carries.
pub const CHUNK_BYTES: usize = 256 << 10;

/// What the kit asks of the agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// Runs a shell command; answered by `Output`s and one `Ended`.
    Run {
        /// The number of the job, chosen by the kit.
        job: u32,
        /// For `/bin/sh -c`.
        command: String,
    },
    /// Sends a signal to all processes of a job; answered by `Done` or `Failed`.
    Signal {
        /// The number of this request.
        id: u32,
        /// The job that gets it.
        job: u32,
        /// A Linux signal number.
        signal: u8,
    },
    /// Writes a file, or adds to it; answered by `Done` or `Failed`.
    Write {
        /// The number of this request.
        id: u32,
        /// Permission bits for a new file.
        mode: u32,
        /// Whether the bytes go behind what is there.
        append: bool,
        /// Where; missing folders are made.
        path: String,
        /// At most [`CHUNK_BYTES`].
        data: Vec<u8>,
    },
    /// Reads a whole file; answered by `Data`s and `Done`, or `Failed`.
    Read {
        /// The number of this request.
        id: u32,
        /// Which file.
        path: String,
    },
    /// Answered by `Done`: the agent is alive.
    Ping {
        /// The number of this request.
        id: u32,
    },
}

/// Which of its outputs a job wrote to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    /// File descriptor 1.
    Stdout,
    /// File descriptor 2.
    Stderr,
}

/// How a job ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// It exited with this code.
    Exited(u8),
    /// This signal ended it.
    Signalled(u8),
}

/// What the agent says to the kit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// The first message: the guest is up.
    Hello {
        /// The guest's kernel release.
        kernel: String,
    },
    /// A job wrote something.
    Output {
        /// The number of the job.
        job: u32,
        /// Where to.
        stream: Stream,
        /// What.
        data: Vec<u8>,
    },
    /// A job has ended, and nothing holds its outputs any more.
    Ended {
        /// The number of the job.
        job: u32,
        /// How.
        ending: Ending,
    },
    /// A part of a file that was asked for.
    Data {
        /// The number of the request.
        id: u32,
        /// At most [`CHUNK_BYTES`].
        data: Vec<u8>,
    },
    /// A request was carried out.
    Done {
        /// The number of the request.
        id: u32,
    },
    /// A request (or the start of a job) failed.
    Failed {
        /// The number of the request, or of the job.
        id: u32,
        /// Why.
        message: String,
    },
}

/// Why bytes are no message.
#[derive(Debug, thiserror::Error)]
pub enum ProtocolError {
    /// The stream failed.
    #[error("Agent port failed")]
    Io(#[from] io::Error),
    /// A length beyond the limit: the stream is out of step.
    #[error("Frame of {0} bytes, at most {FRAME_MAX_BYTES} are allowed")]
    TooLong(u32),
    /// A frame that ends too early.
    #[error("Frame ends before its last field")]
    Truncated,
    /// A message type or value that does not exist.
    #[error("Unknown value {value} for a message's {field}")]
    Unknown {
        /// Which field.
        field: &'static str,
        /// What it had.
        value: u8,
    },
    /// Text that is not UTF-8.
    #[error("Text is not UTF-8")]
    NotText(#[from] std::string::FromUtf8Error),
}

/// A message with a byte form.
pub trait Message: Sized {
    /// Appends the bytes of this message.
    fn encode(&self, out: &mut Vec<u8>);
    /// Reads one message.
    ///
    /// # Errors
    /// When the bytes are no message.
    fn decode(bytes: &[u8]) -> Result<Self, ProtocolError>;
}

/// Writes one frame with a single `write` call where the stream takes it whole.
///
/// # Errors
/// When the stream fails, or the message is longer than a frame may be.
pub fn send<M: Message>(stream: &mut impl Write, message: &M) -> Result<(), ProtocolError> {
    let mut frame = vec![0; 4];
    message.encode(&mut frame);
    let length = u32::try_from(frame.len() - 4).unwrap_or(u32::MAX);
    if length > FRAME_MAX_BYTES {
        return Err(ProtocolError::TooLong(length));
    }
    frame[..4].copy_from_slice(&length.to_le_bytes());
    stream.write_all(&frame)?;
    stream.flush()?;
    Ok(())
}

/// Reads one frame; `None` at the end of the stream.
///
/// # Errors
/// When the stream fails or carries something else.
pub fn receive<M: Message>(stream: &mut impl Read) -> Result<Option<M>, ProtocolError> {
    let mut length = [0; 4];
    match stream.read_exact(&mut length) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        other => other?,
    }
    let length = u32::from_le_bytes(length);
    if length > FRAME_MAX_BYTES {
        return Err(ProtocolError::TooLong(length));
    }
    let mut frame = Vec::new();
    stream.take(u64::from(length)).read_to_end(&mut frame)?;
    if u32::try_from(frame.len()).ok() != Some(length) {
        return Ok(None);
    }
    M::decode(&frame).map(Some)
}

impl Message for Request {
    fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Request::Run { job, command } => {
                out.push(1);
                put_u32(out, *job);
                out.extend(command.as_bytes());
            }
            Request::Signal { id, job, signal } => {
                out.push(2);
                put_u32(out, *id);
                put_u32(out, *job);
                out.push(*signal);
            }
            Request::Write {
                id,
                mode,
                append,
                path,
                data,
            } => {
                out.push(3);
                put_u32(out, *id);
                put_u32(out, *mode);
                out.push(u8::from(*append));
                put_u32(out, u32::try_from(path.len()).unwrap_or(u32::MAX));
                out.extend(path.as_bytes());
                out.extend(data);
            }
            Request::Read { id, path } => {
                out.push(4);
                put_u32(out, *id);
                out.extend(path.as_bytes());
            }
            Request::Ping { id } => {
                out.push(5);
                put_u32(out, *id);
            }
        }
    }

    fn decode(bytes: &[u8]) -> Result<Self, ProtocolError> {
        let mut fields = Fields(bytes);
        Ok(match fields.u8()? {
            1 => Request::Run {
                job: fields.u32()?,
                command: fields.rest_text()?,
            },
            2 => Request::Signal {
                id: fields.u32()?,
                job: fields.u32()?,
                signal: fields.u8()?,
            },
            3 => {
                let (id, mode, append) = (fields.u32()?, fields.u32()?, fields.u8()? != 0);
                let length = fields.u32()?;
                let path = String::from_utf8(
                    fields
                        .take(usize::try_from(length).unwrap_or(usize::MAX))?
                        .to_vec(),
                )?;
                Request::Write {
                    id,
                    mode,
                    append,
                    path,
                    data: fields.rest(),
                }
            }
            4 => Request::Read {
                id: fields.u32()?,
                path: fields.rest_text()?,
            },
            5 => Request::Ping { id: fields.u32()? },
            value => {
                return Err(ProtocolError::Unknown {
                    field: "type",
                    value,
                });
            }
        })
    }
}

impl Message for Reply {
    fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Reply::Hello { kernel } => {
                out.push(1);
                out.extend(kernel.as_bytes());
            }
            Reply::Output { job, stream, data } => {
                out.push(2);
                put_u32(out, *job);
                out.push(match stream {
                    Stream::Stdout => 1,
                    Stream::Stderr => 2,
                });
                out.extend(data);
            }
            Reply::Ended { job, ending } => {
                out.push(3);
                put_u32(out, *job);
                let (how, value) = match ending {
                    Ending::Exited(code) => (0, *code),
                    Ending::Signalled(signal) => (1, *signal),
                };
                out.extend([how, value]);
            }
            Reply::Data { id, data } => {
                out.push(4);
                put_u32(out, *id);
                out.extend(data);
            }
            Reply::Done { id } => {
                out.push(5);
                put_u32(out, *id);
            }
            Reply::Failed { id, message } => {
                out.push(6);
                put_u32(out, *id);
                out.extend(message.as_bytes());
            }
        }
    }

    fn decode(bytes: &[u8]) -> Result<Self, ProtocolError> {
        let mut fields = Fields(bytes);
        Ok(match fields.u8()? {
            1 => Reply::Hello {
                kernel: fields.rest_text()?,
            },
            2 => Reply::Output {
                job: fields.u32()?,
                stream: match fields.u8()? {
                    1 => Stream::Stdout,
                    2 => Stream::Stderr,
                    value => {
                        return Err(ProtocolError::Unknown {
                            field: "stream",
                            value,
                        });
                    }
                },
                data: fields.rest(),
            },
            3 => Reply::Ended {
                job: fields.u32()?,
                ending: match (fields.u8()?, fields.u8()?) {
                    (0, code) => Ending::Exited(code),
                    (1, signal) => Ending::Signalled(signal),
                    (value, _) => {
                        return Err(ProtocolError::Unknown {
                            field: "ending",
                            value,
                        });
                    }
                },
            },
            4 => Reply::Data {
                id: fields.u32()?,
                data: fields.rest(),
            },
            5 => Reply::Done { id: fields.u32()? },
            6 => Reply::Failed {
                id: fields.u32()?,
                message: fields.rest_text()?,
            },
            value => {
                return Err(ProtocolError::Unknown {
                    field: "type",
                    value,
                });
            }
        })
    }
}

fn put_u32(out: &mut Vec<u8>, value: u32) {
    out.extend(value.to_le_bytes());
}

/// The bytes of a message that are not read yet.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take(&mut self, length: usize) -> Result<&[u8], ProtocolError> {
        let (taken, rest) = self
            .0
            .split_at_checked(length)
            .ok_or(ProtocolError::Truncated)?;
        self.0 = rest;
        Ok(taken)
    }

    fn u8(&mut self) -> Result<u8, ProtocolError> {
        Ok(self.take(1)?[0])
    }

    fn u32(&mut self) -> Result<u32, ProtocolError> {
        let bytes = self
            .take(4)?
            .try_into()
            .map_err(|_| ProtocolError::Truncated)?;
        Ok(u32::from_le_bytes(bytes))
    }

    fn rest(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.0).to_vec()
    }

    fn rest_text(&mut self) -> Result<String, ProtocolError> {
        Ok(String::from_utf8(self.rest())?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn requests() -> impl Strategy<Value = Request> {
        prop_oneof![
            (any::<u32>(), ".*").prop_map(|(job, command)| Request::Run { job, command }),
            any::<(u32, u32, u8)>().prop_map(|(id, job, signal)| Request::Signal {
                id,
                job,
                signal
            }),
            (any::<(u32, u32, bool)>(), ".*", any::<Vec<u8>>()).prop_map(
                |((id, mode, append), path, data)| Request::Write {
                    id,
                    mode,
                    append,
                    path,
                    data
                }
            ),
            (any::<u32>(), ".*").prop_map(|(id, path)| Request::Read { id, path }),
            any::<u32>().prop_map(|id| Request::Ping { id }),
        ]
    }

    fn replies() -> impl Strategy<Value = Reply> {
        prop_oneof![
            ".*".prop_map(|kernel| Reply::Hello { kernel }),
            any::<(u32, bool, Vec<u8>)>().prop_map(|(job, out, data)| Reply::Output {
                job,
                stream: if out { Stream::Stdout } else { Stream::Stderr },
                data
            }),
            any::<(u32, bool, u8)>().prop_map(|(job, exited, value)| Reply::Ended {
                job,
                ending: if exited {
                    Ending::Exited(value)
                } else {
                    Ending::Signalled(value)
                }
            }),
            any::<(u32, Vec<u8>)>().prop_map(|(id, data)| Reply::Data { id, data }),
            any::<u32>().prop_map(|id| Reply::Done { id }),
            (any::<u32>(), ".*").prop_map(|(id, message)| Reply::Failed { id, message }),
        ]
    }

    proptest! {
        #[test]
        fn a_request_comes_out_as_it_went_in(request in requests()) {
            let mut bytes = Vec::new();
            send(&mut bytes, &request).unwrap();
            prop_assert_eq!(receive::<Request>(&mut bytes.as_slice()).unwrap(), Some(request));
        }

        #[test]
        fn a_reply_comes_out_as_it_went_in(reply in replies()) {
            let mut bytes = Vec::new();
            send(&mut bytes, &reply).unwrap();
            prop_assert_eq!(receive::<Reply>(&mut bytes.as_slice()).unwrap(), Some(reply));
        }

        #[test]
        fn any_bytes_are_taken_or_refused_without_a_panic(bytes: Vec<u8>) {
            let _taken = Request::decode(&bytes).is_ok();
            let _taken = Reply::decode(&bytes).is_ok();
        }
    }

    #[test]
    fn a_length_beyond_the_limit_is_refused_before_anything_is_allocated() {
        let bytes = u32::MAX.to_le_bytes();
        assert!(matches!(
            receive::<Reply>(&mut bytes.as_slice()),
            Err(ProtocolError::TooLong(u32::MAX))
        ));
    }

    #[test]
    fn a_stream_that_ends_within_a_frame_is_at_its_end() {
        let mut bytes = Vec::new();
        send(&mut bytes, &Reply::Done { id: 7 }).unwrap();
        bytes.pop();
        assert!(receive::<Reply>(&mut bytes.as_slice()).unwrap().is_none());
    }
}
