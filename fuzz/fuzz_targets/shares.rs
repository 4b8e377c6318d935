//! Messages from untrusted senders: a changed valid one, or any bytes, with missing, surplus or other descriptors. A
//! received tensor must be readable and writable to its end; a refused one must leave no descriptor open.
#![no_main]

use std::{ffi::c_int, fs, io, mem, os::fd::RawFd, ptr, slice};

use arbitrary::Arbitrary;
use dlpark::ffi::{DLDevice, DLDeviceType};
use gradcodec::capi::*;
use libfuzzer_sys::fuzz_target;

const CPU: DLDevice = DLDevice { device_type: DLDeviceType::CPU, device_id: 0 };
const CUDA: DLDevice = DLDevice { device_type: DLDeviceType::CUDA, device_id: 0 };
/// Statuses that may occur: OK, INVALID_ARGUMENT, CORRUPT, DRIVER_UNAVAILABLE (no driver here), SHARE, TIMEOUT.
const STATUSES: [gc_status_t; 6] = [0, 1, 9, 20, 40, 41];
const SEALS: c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

#[derive(Arbitrary, Debug)]
struct Input {
    shape: Vec<u8>,
    bits: u8,
    lanes: u8,
    /// Changes of the message: the number of a byte, and a mask for XOR.
    changes: Vec<(u8, u8)>,
    /// Number of bytes that are sent; None: all.
    cut: Option<u8>,
    noise: Option<Vec<u8>>,
    /// Size of the memory in bytes, in place of the message's.
    memory: Option<u16>,
    seals: Option<u8>,
    descriptors: u8,
    in_the_wrong_order: bool,
    /// For memory of CUDA: strides, the offset, the sizes of parts.
    on_cuda: Option<(Vec<i8>, u16, Vec<u16>)>,
    is_for_cuda: bool,
}

impl Input {
    fn message(&self) -> (Vec<u8>, i64) {
        let sizes = &self.shape[..self.shape.len().min(20)];
        let bits = i64::from(self.bits) * i64::from(self.lanes);
        let bits = sizes.iter().fold(bits, |product, &size| product.saturating_mul(size.into()));
        let mut bytes = bits / 8 + i64::from(bits % 8 > 0);
        let mut behind = Vec::new();
        if let Some((strides, offset, parts)) = &self.on_cuda {
            let strides = (0..sizes.len()).map(|axis| strides.get(axis).copied().unwrap_or(1));
            strides.for_each(|stride| behind.extend(i64::from(stride).to_ne_bytes()));
            behind.extend(u64::from(*offset).to_ne_bytes());
            behind.extend([7; 64 + 16]);
            parts.iter().for_each(|&part| behind.extend(u64::from(part).to_ne_bytes()));
            if !parts.is_empty() {
                bytes = parts.iter().map(|&part| i64::from(part)).sum();
            }
        }
        let mut text = b"GCSH".to_vec();
        let length = (32 + 8 * sizes.len() + behind.len()) as u32;
        for word in [1, length, sizes.len() as u32, 1 + u32::from(self.on_cuda.is_some())] {
            text.extend(word.to_ne_bytes());
        }
        text.extend([1, self.bits, self.lanes, 0]);
        text.extend(bytes.to_ne_bytes());
        sizes.iter().for_each(|&size| text.extend(i64::from(size).to_ne_bytes()));
        text.extend(behind);
        for &(at, xor) in &self.changes {
            let at = usize::from(at) % text.len();
            text[at] ^= xor;
        }
        text.truncate(self.cut.map_or(text.len(), usize::from));
        (self.noise.clone().unwrap_or(text), bytes)
    }
}

fn done(code: c_int) -> c_int {
    assert!(code >= 0, "{}", io::Error::last_os_error());
    code
}

/// # Safety
/// `numbers` are open descriptors.
unsafe fn send(to: RawFd, text: &[u8], numbers: &[RawFd]) {
    let mut room = [0u64; 8];
    let mut piece = libc::iovec { iov_base: text.as_ptr().cast_mut().cast(), iov_len: text.len() };
    // SAFETY: the parts of the message outlive the call, and `room` is large enough for the descriptors.
    unsafe {
        let mut message: libc::msghdr = mem::zeroed();
        (message.msg_iov, message.msg_iovlen) = (&mut piece, 1);
        if !numbers.is_empty() {
            let bytes = size_of_val(numbers) as u32;
            message.msg_control = room.as_mut_ptr().cast();
            message.msg_controllen = libc::CMSG_SPACE(bytes) as usize;
            let header = libc::CMSG_FIRSTHDR(&message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(bytes) as usize;
            ptr::copy_nonoverlapping(numbers.as_ptr().cast(), libc::CMSG_DATA(header), bytes as usize);
        }
        assert_eq!(libc::sendmsg(to, &message, libc::MSG_NOSIGNAL), text.len() as isize);
    }
}

fn open_descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

fuzz_target!(|input: Input| {
    let (text, bytes) = input.message();
    let before = open_descriptors();
    // SAFETY: this function owns the descriptors, and closes them at its end; the tensor is released once.
    unsafe {
        let (mut ends, mut answers) = ([0; 2], [0; 2]);
        for pair in [&mut ends, &mut answers] {
            done(libc::socketpair(libc::AF_UNIX, libc::SOCK_STREAM, 0, pair.as_mut_ptr()));
        }
        let memory = done(libc::memfd_create(c"stranger".as_ptr(), libc::MFD_ALLOW_SEALING));
        done(libc::ftruncate(memory, input.memory.map_or(bytes.min(1 << 20), i64::from)));
        done(libc::fcntl(memory, libc::F_ADD_SEALS, input.seals.map_or(SEALS, |seals| SEALS & c_int::from(seals))));
        let mut numbers = [memory, answers[1], ends[0], memory];
        if input.in_the_wrong_order {
            numbers.reverse();
        }
        if !text.is_empty() {
            send(ends[0], &text, &numbers[..usize::from(input.descriptors) % 5]);
        }
        libc::close(answers[1]);
        let mut out = ptr::dangling_mut();
        let status = gc_share_receive(ends[1], if input.is_for_cuda { CUDA } else { CPU }, 0, &mut out);
        assert!(STATUSES.contains(&status), "{status}");
        assert!(input.is_for_cuda || status != 20);
        if status == 0 {
            let tensor = &(*out).dl_tensor;
            let sizes = (0..tensor.ndim as usize).map(|axis| *tensor.shape.add(axis));
            if sizes.clone().all(|size| size > 0) {
                let bits = i64::from(tensor.dtype.bits) * i64::from(tensor.dtype.lanes) * sizes.product::<i64>();
                slice::from_raw_parts_mut(tensor.data.cast::<u8>(), (bits + 7) as usize / 8).fill(7);
            }
            gc_tensor_free(out);
        } else {
            assert_eq!(out, ptr::dangling_mut());
        }
        // The sender receives the status, or the end of the stream.
        let mut answer = 0u8;
        let told = libc::recv(answers[0], ptr::from_mut(&mut answer).cast(), 1, libc::MSG_DONTWAIT);
        assert!(
            told == 0 || told == 1 && i32::from(answer) == status || told < 0 && input.descriptors % 5 < 2,
            "{told}"
        );
        for number in [ends[0], ends[1], answers[0], memory] {
            libc::close(number);
        }
    }
    assert_eq!(open_descriptors(), before);
});
