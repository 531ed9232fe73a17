//! The controller, enabled, and its admin queue.

use super::memory::PAGE;
use super::queue::Bell;
use super::wire::admin;
use super::{Command, Completion, Memory, Queue, Register, Transport};
use farlane_abi::width::halves;
use farlane_nvme::bits::register::DOORBELLS;
use std::io;
use std::time::{Duration, Instant};
use thiserror::Error;

/// Longer than a controller takes for anything.
const TIMEOUT: Duration = Duration::from_secs(30);
const ADMIN_ENTRIES: u32 = 64;
/// A completion queue has interrupts (NVMe 1.4, figure 152); the vector is in the upper half.
const INTERRUPTS: u32 = 0b10;

/// Why something did not work.
#[derive(Debug, Error)]
pub enum DriverError {
    /// The transport, or memory.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// Outside of memory.
    #[error(transparent)]
    Bounds(#[from] farlane_zero_copy::OutOfBounds),
    /// The controller does not do what was waited for.
    #[error("The controller's status is {status:#x} after {} s: {what} has not \
             happened", TIMEOUT.as_secs())]
    Timeout {
        /// What.
        what: &'static str,
        /// CSTS.
        status: u32,
    },
    /// The controller has failed.
    #[error("The controller reports a fatal error")]
    Fatal,
    /// A command was answered with an error.
    #[error("Command {opcode:#x} has failed with status {status:#x}")]
    Status {
        /// Opcode.
        opcode: u8,
        /// Type and code.
        status: u16,
    },
}

/// A controller.
pub struct Driver<T> {
    transport: T,
    memory: Memory,
    admin: Queue,
    /// A page for the data of admin commands.
    page: u64,
    shadow: Option<(u64, u64)>,
    next_cid: u16,
    /// Doorbell registers written.
    pub rings: u64,
}

impl<T: Transport> Driver<T> {
    /// Maps `memory`, resets the controller, and enables it.
    ///
    /// # Errors
    /// See [`DriverError`].
    pub fn start(mut transport: T, mut memory: Memory) -> Result<Self, DriverError> {
        transport.map(&memory)?;
        let sq = memory.allocate(u64::from(ADMIN_ENTRIES) * 64)?;
        let cq = memory.allocate(u64::from(ADMIN_ENTRIES) * 16)?;
        let page = memory.allocate(PAGE)?;
        let mut driver = Self {
            admin: Queue::new(0, ADMIN_ENTRIES, &memory, sq, cq),
            transport,
            memory,
            page,
            shadow: None,
            next_cid: 0,
            rings: 0,
        };
        driver.admin.bell = driver.page_bell();
        driver.disable()?;
        driver.set(Register::Aqa, (ADMIN_ENTRIES - 1) * 0x1_0001)?;
        driver
            .transport
            .write(Register::Asq as u64, &sq.to_le_bytes())?;
        driver
            .transport
            .write(Register::Acq as u64, &cq.to_le_bytes())?;
        driver.set(Register::Cc, 0x0046_0001)?;
        driver.wait(1, 1, "being ready")?;
        Ok(driver)
    }

    /// Resets the controller (CC.EN).
    ///
    /// # Errors
    /// See [`DriverError`].
    pub fn disable(&mut self) -> Result<(), DriverError> {
        self.set(Register::Cc, 0)?;
        // After a fatal error it is not ready to begin with: the error goes with the reset.
        self.wait(3, 0, "being disabled")
    }

    /// A register.
    ///
    /// # Errors
    /// Those of the transport.
    pub fn get(&mut self, register: Register) -> io::Result<u32> {
        let mut data = [0; 4];
        self.transport.read(register as u64, &mut data)?;
        Ok(u32::from_le_bytes(data))
    }

    /// Writes a register.
    ///
    /// # Errors
    /// Those of the transport.
    pub fn set(&mut self, register: Register, value: u32) -> io::Result<()> {
        self.transport.write(register as u64, &value.to_le_bytes())
    }

    /// Waits until bits of CSTS are so.
    ///
    /// # Errors
    /// [`DriverError::Timeout`].
    pub fn wait(&mut self, mask: u32, value: u32, what: &'static str) -> Result<(), DriverError> {
        let start = Instant::now();
        loop {
            let status = self.get(Register::Csts)?;
            if status & mask == value {
                return Ok(());
            }
            if status & 2 != 0 && value & 2 == 0 && value & 1 != 0 {
                return Err(DriverError::Fatal);
            }
            if start.elapsed() > TIMEOUT {
                return Err(DriverError::Timeout { what, status });
            }
            std::thread::yield_now();
        }
    }

    fn page_bell(&self) -> Bell {
        let page = self.transport.doorbells();
        page.map_or(Bell::Trapped, |page| Bell::Page(page.clone()))
    }

    /// The transport.
    pub fn transport(&mut self) -> &mut T {
        &mut self.transport
    }

    /// Memory.
    pub fn memory(&mut self) -> &mut Memory {
        &mut self.memory
    }

    /// Gives the transport and the memory back, without a word to the controller.
    pub fn into_parts(self) -> (T, Memory) {
        (self.transport, self.memory)
    }

    /// The page that [`identify`](Self::identify) and others use: for data of admin commands.
    #[must_use]
    pub fn admin_page(&self) -> u64 {
        self.page
    }

    /// Puts a command into a queue without telling the controller. False if the queue is full.
    pub fn push(queue: &mut Queue, command: &Command) -> bool {
        queue.push(command)
    }

    /// Tells the controller of what was put into a queue.
    ///
    /// # Errors
    /// Those of the transport.
    pub fn ring(&mut self, queue: &mut Queue) -> io::Result<()> {
        if let Some(tail) = queue.ring_tail() {
            self.rings += 1;
            let at = DOORBELLS + u64::from(queue.id) * 8;
            self.transport.write(at, &tail.to_le_bytes())?;
        }
        Ok(())
    }

    /// Tells the controller of what was taken from a queue.
    ///
    /// # Errors
    /// Those of the transport.
    pub fn ring_head(&mut self, queue: &mut Queue) -> io::Result<()> {
        if let Some(head) = queue.ring_head() {
            self.rings += 1;
            let at = DOORBELLS + u64::from(queue.id) * 8 + 4;
            self.transport.write(at, &head.to_le_bytes())?;
        }
        Ok(())
    }

    /// Submits a command and waits for its answer, whatever it is. Answers to others are lost.
    ///
    /// # Errors
    /// [`DriverError::Timeout`], [`DriverError::Fatal`].
    pub fn execute(
        &mut self,
        queue: &mut Queue,
        command: Command,
    ) -> Result<Completion, DriverError> {
        let cid = self.next_cid;
        self.next_cid = (cid + 1) % 0x8000;
        queue.push(&command.id(cid));
        self.ring(queue)?;
        self.await_answer(queue, Some(cid))
    }

    /// Waits for the answer to a command, or for any.
    ///
    /// # Errors
    /// [`DriverError::Timeout`], [`DriverError::Fatal`].
    pub fn await_answer(
        &mut self,
        queue: &mut Queue,
        cid: Option<u16>,
    ) -> Result<Completion, DriverError> {
        let start = Instant::now();
        let mut polls = 0_u32;
        loop {
            if let Some(completion) = queue.pop() {
                self.ring_head(queue)?;
                if cid.is_none_or(|cid| cid == completion.cid) {
                    return Ok(completion);
                }
            }
            polls += 1;
            if polls.is_multiple_of(64) {
                std::thread::yield_now();
            }
            if polls.is_multiple_of(4096) {
                let status = self.get(Register::Csts)?;
                if status & 2 != 0 {
                    return Err(DriverError::Fatal);
                }
                if start.elapsed() > TIMEOUT {
                    let what = "an answer";
                    return Err(DriverError::Timeout { what, status });
                }
            }
        }
    }

    /// Executes an admin command, whatever the answer.
    ///
    /// # Errors
    /// As [`execute`](Self::execute).
    pub fn try_admin(&mut self, command: Command) -> Result<Completion, DriverError> {
        // A queue that is not there for the moment.
        let none = Queue::new(0, 2, &self.memory, 0, 0);
        let mut queue = std::mem::replace(&mut self.admin, none);
        let result = self.execute(&mut queue, command);
        self.admin = queue;
        result
    }

    /// Puts an admin command into its queue and rings, without waiting.
    ///
    /// # Errors
    /// Those of the transport.
    pub fn submit_admin(&mut self, command: Command) -> Result<(), DriverError> {
        let none = Queue::new(0, 2, &self.memory, 0, 0);
        let mut queue = std::mem::replace(&mut self.admin, none);
        queue.push(&command);
        let result = self.ring(&mut queue);
        self.admin = queue;
        Ok(result?)
    }

    /// Waits for the answer to an admin command.
    ///
    /// # Errors
    /// As [`execute`](Self::execute).
    pub fn await_admin(&mut self, cid: Option<u16>) -> Result<Completion, DriverError> {
        let none = Queue::new(0, 2, &self.memory, 0, 0);
        let mut queue = std::mem::replace(&mut self.admin, none);
        let result = self.await_answer(&mut queue, cid);
        self.admin = queue;
        result
    }

    /// Executes an admin command, which succeeds.
    ///
    /// # Errors
    /// [`DriverError::Status`], too.
    pub fn admin(&mut self, command: Command) -> Result<Completion, DriverError> {
        let completion = self.try_admin(command)?;
        if completion.status == 0 {
            return Ok(completion);
        }
        Err(DriverError::Status {
            opcode: command.0.opcode,
            status: completion.code(),
        })
    }

    /// Identify: `what` (CNS) of `nsid`, 4096 bytes.
    ///
    /// # Errors
    /// See [`DriverError`].
    pub fn identify(&mut self, what: u32, nsid: u32) -> Result<Vec<u8>, DriverError> {
        let command = Command::new(admin::IDENTIFY, nsid);
        self.admin(command.prp(self.page, 0).dword(10, what))?;
        let mut data = vec![0; 4096];
        self.memory.read(self.page, &mut data)?;
        Ok(data)
    }

    /// Creates a pair of queues; its vector is its number.
    ///
    /// # Errors
    /// See [`DriverError`].
    pub fn create_queue(&mut self, id: u16, entries: u32) -> Result<Queue, DriverError> {
        let sq = self.memory.allocate(u64::from(entries) * 64)?;
        let cq = self.memory.allocate(u64::from(entries) * 16)?;
        self.create(id, entries, sq, cq, INTERRUPTS | u32::from(id) << 16)?;
        let mut queue = Queue::new(id, entries, &self.memory, sq, cq);
        queue.bell = self.bell();
        Ok(queue)
    }

    /// Creates a pair of queues without interrupts: with them a controller may refuse a vector
    /// while MSI-X is off.
    ///
    /// # Errors
    /// See [`DriverError`].
    pub fn create_polled_queue(&mut self, id: u16, entries: u32) -> Result<Queue, DriverError> {
        let sq = self.memory.allocate(u64::from(entries) * 64)?;
        let cq = self.memory.allocate(u64::from(entries) * 16)?;
        self.create(id, entries, sq, cq, 0)?;
        let mut queue = Queue::new(id, entries, &self.memory, sq, cq);
        queue.bell = self.bell();
        Ok(queue)
    }

    /// Creates a pair of queues in any memory that the controller reaches: where the commands are,
    /// and where the completions. The latter has not been used before.
    ///
    /// # Errors
    /// See [`DriverError`].
    pub fn create_queue_at(
        &mut self,
        id: u16,
        entries: u32,
        sq: (&Memory, u64),
        cq: (&Memory, u64),
    ) -> Result<Queue, DriverError> {
        self.create(id, entries, sq.1, cq.1, INTERRUPTS | u32::from(id) << 16)?;
        let mut queue = Queue::across(id, entries, sq, cq);
        queue.bell = self.bell();
        Ok(queue)
    }

    fn create(
        &mut self,
        id: u16,
        entries: u32,
        sq: u64,
        cq: u64,
        interrupts: u32,
    ) -> Result<(), DriverError> {
        let size = (entries - 1) << 16 | u32::from(id);
        let contiguous = 1;
        self.admin(
            Command::new(admin::CREATE_CQ, 0)
                .prp(cq, 0)
                .dword(10, size)
                .dword(11, interrupts | contiguous),
        )?;
        self.admin(
            Command::new(admin::CREATE_SQ, 0)
                .prp(sq, 0)
                .dword(10, size)
                .dword(11, u32::from(id) << 16 | contiguous),
        )?;
        Ok(())
    }

    /// The doorbells of an I/O queue.
    fn bell(&self) -> Bell {
        match self.shadow {
            Some((doorbells, events)) => Bell::Shadow {
                memory: self.memory.bytes().clone(),
                doorbells: self.memory.offset(doorbells),
                events: self.memory.offset(events),
            },
            None => self.page_bell(),
        }
    }

    /// Deletes a pair of queues.
    ///
    /// # Errors
    /// See [`DriverError`].
    pub fn delete_queue(&mut self, queue: &Queue) -> Result<(), DriverError> {
        let id = u32::from(queue.id);
        self.admin(Command::new(admin::DELETE_SQ, 0).dword(10, id))?;
        self.admin(Command::new(admin::DELETE_CQ, 0).dword(10, id))?;
        Ok(())
    }

    /// Uses shadow doorbells for queues that are created from now on.
    ///
    /// # Errors
    /// See [`DriverError`].
    pub fn use_shadow_doorbells(&mut self) -> Result<(), DriverError> {
        let doorbells = self.memory.allocate(PAGE)?;
        let events = self.memory.allocate(PAGE)?;
        self.admin(Command::new(admin::DOORBELL_BUFFER, 0).prp(doorbells, events))?;
        self.shadow = Some((doorbells, events));
        Ok(())
    }

    /// Physical region pages for `bytes` of contiguous memory at `address`; allocates a list where
    /// one is needed.
    ///
    /// # Errors
    /// Out of memory.
    pub fn prps(&mut self, address: u64, bytes: u64) -> Result<(u64, u64), DriverError> {
        let first_page = PAGE - address % PAGE;
        if bytes <= first_page {
            return Ok((address, 0));
        }
        let second = address + first_page;
        if bytes - first_page <= PAGE {
            return Ok((address, second));
        }
        let count = (bytes - first_page).div_ceil(PAGE);
        let list = self.memory.allocate(count * 8)?;
        for i in 0..count {
            let entry = (second + i * PAGE).to_le_bytes();
            self.memory.write(list + i * 8, &entry)?;
        }
        Ok((address, list))
    }

    /// The size of a namespace: blocks, and bytes of a block.
    ///
    /// # Errors
    /// See [`DriverError`].
    pub fn size(&mut self, nsid: u32) -> Result<(u64, u64), DriverError> {
        let data = self.identify(0, nsid)?;
        let blocks = data[..8].try_into().map_or(0, u64::from_le_bytes);
        Ok((blocks, 1 << (data[130] & 63)))
    }

    /// Has the controller make everything durable (CC.SHN), and waits for that.
    ///
    /// # Errors
    /// See [`DriverError`].
    pub fn shut_down(&mut self) -> Result<(), DriverError> {
        let cc = self.get(Register::Cc)?;
        self.set(Register::Cc, cc | 1 << 14)?;
        self.wait(0b1100, 0b1000, "the shutdown")
    }

    /// Address as two dwords, low first.
    #[must_use]
    pub fn dwords(value: u64) -> [u32; 2] {
        halves(value)
    }
}
