//! A process that does with verbs what it is told, a line at a time, and says what came of it.

use crate::common::{Partner, say, told, until};
use crate::{RIGHTS, errno, open_device, zeroed};
use farlane_verbs::sys::*;
use farlane_verbs::{completion, context, import, memory, queue_pair};
use std::ffi::c_int;
use std::fs::File;
use std::os::fd::IntoRawFd as _;
use std::path::Path;
use std::ptr::null_mut;

/// Tells such a process where the backend is.
const SOCKET: &str = "FARLANE_TEST_PROGRAM_SOCKET";
/// Bytes of each of its registrations.
pub const LENGTH: usize = 1 << 16;
/// Where its registrations lie, one behind the other: at the same addresses in each process.
const MEMORY: usize = 0x5a5a_0000_0000;

/// Of `enum ibv_wc_status`.
pub const LOC_PROT_ERR: u64 = 4;
pub const REM_ACCESS_ERR: u64 = 10;
pub const RETRY_EXC_ERR: u64 = 12;

/// Such a process, from outside.
pub struct Remote(Partner);

impl Remote {
    /// Starts one that runs `test`, which calls [`serve_if_told`].
    pub fn start(test: &str, socket: &Path) -> Self {
        Self(Partner::start(test, SOCKET, socket))
    }

    /// Has it do something. Returns the numbers that it answers with.
    pub fn ask<const N: usize>(&mut self, what: impl std::fmt::Display) -> [u64; N] {
        self.0.tell(&what.to_string());
        self.0.hear_numbers()
    }

    /// The same, of what has one number for an answer.
    pub fn ask_one(&mut self, what: impl std::fmt::Display) -> u64 {
        let [number] = self.ask(what);
        number
    }

    /// The next number that it says of itself.
    pub fn hear(&mut self) -> u64 {
        let [number] = self.0.hear_numbers();
        number
    }

    /// Has it do something that fails. Returns why.
    pub fn refused(&mut self, what: impl std::fmt::Display) -> c_int {
        self.0.tell(&what.to_string());
        let said = self.0.hear();
        let number = said.strip_prefix("errno ");
        number.unwrap_or_else(|| panic!("{said}")).parse().unwrap()
    }

    /// Has two more keys in its context at once than it has now. A context keeps the room that
    /// it has had, and that is in the ledger.
    pub fn make_room_for_keys(&mut self) {
        let indices = [(); 2].map(|()| self.ask::<5>("register")[0]);
        for index in indices {
            assert_eq!(self.ask_one(format!("deregister {index}")), 0);
        }
    }

    /// Kills it, whatever it does.
    pub fn kill(&mut self) {
        self.0.kill();
    }
}

/// Is such a process, where it was started as one. Returns whether it was.
pub fn serve_if_told() -> bool {
    let Ok(socket) = std::env::var(SOCKET) else {
        return false;
    };
    let mut program = Program {
        socket,
        context: null_mut(),
        pd: null_mut(),
        cq: null_mut(),
        qp: null_mut(),
        memories: Vec::new(),
        registrations: Vec::new(),
    };
    loop {
        let line = told();
        let mut words = line.split(' ');
        let name = words.next().unwrap();
        if name.is_empty() {
            return true;
        }
        let numbers: Vec<u64> = words.map(|word| word.parse().unwrap()).collect();
        // SAFETY: as a C program calls them; who tells it what to do keeps the order.
        match unsafe { program.carry_out(name, &numbers) } {
            Ok(numbers) => {
                let words: Vec<_> = numbers.iter().map(u64::to_string).collect();
                say(words.join(" "));
            }
            Err(errno) => say(format!("errno {errno}")),
        }
    }
}

pub struct Program {
    socket: String,
    pub context: *mut ibv_context,
    pub pd: *mut ibv_pd,
    pub cq: *mut ibv_cq,
    pub qp: *mut ibv_qp_ex,
    pub memories: Vec<*mut u8>,
    pub registrations: Vec<*mut ibv_mr>,
}

/// Why there is none, where there is none.
pub fn there<T>(pointer: *mut T) -> Result<*mut T, c_int> {
    if pointer.is_null() {
        return Err(errno().unwrap());
    }
    Ok(pointer)
}

/// The answer of what returns an error's number.
fn done(returned: c_int) -> Result<Vec<u64>, c_int> {
    match returned {
        0 => Ok(vec![0]),
        errno => Err(errno),
    }
}

fn short(number: u64) -> u32 {
    number.try_into().unwrap()
}

impl Program {
    unsafe fn carry_out(&mut self, name: &str, numbers: &[u64]) -> Result<Vec<u64>, c_int> {
        // SAFETY: by the caller's contract.
        unsafe {
            match (name, numbers) {
                ("open", []) => {
                    self.context = open_device(&self.socket);
                    self.pd = there(memory::alloc_pd(self.context))?;
                    let cmd_fd = (*self.context).cmd_fd.try_into().unwrap();
                    let process = std::process::id().into();
                    Ok(vec![process, cmd_fd, (*self.pd).handle.into()])
                }
                ("import", &[process, cmd_fd, pd]) => {
                    std::env::set_var("FARLANE_SOCKET", &self.socket);
                    let copy = File::open(format!("/proc/{process}/fd/{cmd_fd}")).unwrap();
                    self.context = there(import::device(copy.into_raw_fd()))?;
                    self.pd = there(import::pd(self.context, short(pd)))?;
                    Ok(vec![0])
                }
                ("region", &[handle]) => {
                    let mr = there(import::mr(self.pd, short(handle)))?;
                    let answer = vec![(*mr).lkey.into(), (*mr).rkey.into()];
                    import::unimport_mr(mr);
                    Ok(answer)
                }
                ("register", []) => self.register(),
                ("deregister", &[index]) => {
                    done(memory::dereg_mr(self.registrations[short(index) as usize]))
                }
                ("deallocate", []) => done(memory::dealloc_pd(self.pd)),
                ("look", &[index, at]) => {
                    let memory = self.memories[short(index) as usize];
                    Ok(vec![
                        std::ptr::read_volatile(memory.add(short(at) as usize)).into(),
                    ])
                }
                ("fill", &[index, byte]) => {
                    let memory = self.memories[short(index) as usize];
                    memory.write_bytes(byte.try_into().unwrap(), LENGTH);
                    Ok(vec![0])
                }
                ("qp", []) => self.make_qp(),
                ("connect", &[number]) => self.connect(short(number)),
                ("write", &[lkey, from, rkey, to]) => {
                    self.post_write((short(lkey), from), (short(rkey), to));
                    Ok(vec![self.completion().status.into()])
                }
                ("flood", &[lkey, from, rkey, to]) => {
                    say(0);
                    loop {
                        self.post_write((short(lkey), from), (short(rkey), to));
                        match self.completion().status {
                            0 => {}
                            status => return Ok(vec![status.into()]),
                        }
                    }
                }
                ("objects", []) => self.use_objects(),
                ("leave", []) => self.leave(),
                other => panic!("{other:?}"),
            }
        }
    }

    unsafe fn register(&mut self) -> Result<Vec<u64>, c_int> {
        let place = MEMORY + self.memories.len() * LENGTH;
        // SAFETY: nothing else is there, or this fails; the memory is kept.
        unsafe {
            let address = libc::mmap(
                std::ptr::without_provenance_mut(place),
                LENGTH,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE,
                -1,
                0,
            );
            assert_ne!(
                address,
                libc::MAP_FAILED,
                "{}",
                std::io::Error::last_os_error()
            );
            let mr = there(memory::reg_mr(self.pd, address, LENGTH, RIGHTS))?;
            self.memories.push(address.cast());
            self.registrations.push(mr);
            Ok(vec![
                self.registrations.len() as u64 - 1,
                (*mr).handle.into(),
                (*mr).lkey.into(),
                (*mr).rkey.into(),
                address.expose_provenance() as u64,
            ])
        }
    }

    pub unsafe fn make_qp(&mut self) -> Result<Vec<u64>, c_int> {
        // SAFETY: by the caller's contract.
        unsafe {
            if self.cq.is_null() {
                let cq = completion::create(self.context, 64, null_mut(), null_mut(), 0);
                self.cq = there(cq)?;
            }
            self.end_qp()?;
            let mut init: ibv_qp_init_attr_ex = zeroed();
            init.qp_type = IBV_QPT_RC;
            (init.send_cq, init.recv_cq) = (self.cq, self.cq);
            (init.cap.max_send_wr, init.cap.max_send_sge) = (4, 1);
            (init.cap.max_recv_wr, init.cap.max_recv_sge) = (1, 1);
            init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
            init.pd = self.pd;
            init.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE;
            let qp = there(queue_pair::create_ex(self.context, &raw mut init))?;
            self.qp = queue_pair::extended(qp);
            Ok(vec![(*qp).qp_num.into()])
        }
    }

    /// Destroys the queue pair, if it has one.
    pub unsafe fn end_qp(&mut self) -> Result<(), c_int> {
        if !self.qp.is_null() {
            // SAFETY: by the caller's contract.
            done(unsafe { queue_pair::destroy(self.qp.cast()) })?;
            self.qp = null_mut();
        }
        Ok(())
    }

    /// Connects the queue pair to the one of a number at the same port.
    pub unsafe fn connect(&self, number: u32) -> Result<Vec<u64>, c_int> {
        // SAFETY: by the caller's contract.
        unsafe {
            let mut gid = ibv_gid { raw: [0; 16] };
            farlane_verbs::tables::query_gid(self.context, 1, 0, &raw mut gid);
            let mut attr: ibv_qp_attr = zeroed();
            (attr.port_num, attr.path_mtu) = (1, 3);
            (attr.timeout, attr.retry_cnt) = (10, 1);
            attr.qp_access_flags = 15;
            (attr.ah_attr.is_global, attr.ah_attr.port_num) = (1, 1);
            attr.ah_attr.grh.dgid = gid;
            attr.dest_qp_num = number;
            for (state, mask) in [
                (1, farlane_abi::rdma::QP_TO_INIT),
                (2, farlane_abi::rdma::QP_TO_RTR),
                (3, farlane_abi::rdma::QP_TO_RTS),
            ] {
                attr.qp_state = state;
                let mask = mask.cast_signed();
                done(queue_pair::modify(self.qp.cast(), &raw mut attr, mask))?;
            }
            Ok(vec![0])
        }
    }

    /// Writes all of a registration.
    pub unsafe fn post_write(&self, (lkey, from): (u32, u64), (rkey, to): (u32, u64)) {
        let qp = self.qp;
        // SAFETY: by the caller's contract.
        unsafe {
            ((*qp).wr_start.unwrap())(qp);
            (*qp).wr_flags = IBV_SEND_SIGNALED;
            ((*qp).wr_rdma_write.unwrap())(qp, rkey, to);
            ((*qp).wr_set_sge.unwrap())(qp, lkey, from, LENGTH.try_into().unwrap());
            assert_eq!(((*qp).wr_complete.unwrap())(qp), 0);
        }
    }

    pub unsafe fn completion(&self) -> ibv_wc {
        let mut wc: ibv_wc = zeroed();
        until("a completion", || {
            // SAFETY: by the caller's contract.
            unsafe { completion::poll(self.cq, 1, &raw mut wc) == 1 }
        });
        wc
    }

    /// Gives back the domain, and closes the device.
    unsafe fn leave(&mut self) -> Result<Vec<u64>, c_int> {
        // SAFETY: by the caller's contract.
        unsafe {
            self.end_qp()?;
            if !self.cq.is_null() {
                done(completion::destroy(self.cq))?;
            }
            import::unimport_pd(self.pd);
            done(context::close(self.context))
        }
    }
}
