//! The form in which kernels are kept: parts, each with its length, and a digest of all.
//!
//! ```text
//! "gckernel"  version  0  bytes in all | bytes  part | bytes  part | ... | SHA-256 of all before
//!  8           4        4  8             8             8                   32
//! ```
//!
//! Numbers are little-endian. The digest finds damage, not malice: whoever may write an image may also compute it.

use sha2::{Digest, Sha256};

use crate::error::{Error, Result, error};

use super::room;

const MAGIC: &[u8; 8] = b"gckernel";

/// Changes whenever an image is read in another way.
const VERSION: u32 = 1;

const HEADER: usize = 24;
const DIGEST: usize = 32;

/// An image of parts.
pub fn pack(parts: &[&[u8]]) -> Result<Vec<u8>> {
    let size = HEADER + parts.iter().map(|part| 8 + part.len()).sum::<usize>() + DIGEST;
    let mut bytes = room(size)?;
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&[0; 4]);
    bytes.extend_from_slice(&(size as u64).to_le_bytes());
    for part in parts {
        bytes.extend_from_slice(&(part.len() as u64).to_le_bytes());
        bytes.extend_from_slice(part);
    }
    let digest = Sha256::digest(&bytes);
    bytes.extend_from_slice(&digest);
    Ok(bytes)
}

/// The parts of an image that is whole. A refusal calls it by its name.
pub fn unpack<'a>(name: &str, bytes: &'a [u8]) -> Result<Vec<&'a [u8]>> {
    let given = bytes.len();
    let short = || error!(Corrupt, "{name}: {given} bytes, which is not all of a kernel's image");
    let (body, digest) = bytes.split_last_chunk::<DIGEST>().ok_or_else(short)?;
    let (header, mut left) = body.split_first_chunk::<HEADER>().ok_or_else(short)?;
    let number = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    if !header.starts_with(MAGIC) {
        return Err(error!(Corrupt, "{name}: not the image of a kernel"));
    }
    let version = number(8);
    if version != VERSION {
        return Err(error!(Corrupt, "{name}: an image of version {version}; this library reads version {VERSION}"));
    }
    let size = u64::from(number(16)) | u64::from(number(20)) << 32;
    if size != given as u64 {
        return Err(error!(Corrupt, "{name}: {given} bytes of an image of {size} bytes"));
    }
    if Sha256::digest(body)[..] != digest[..] {
        return Err(error!(Corrupt, "{name}: the image of a kernel, damaged: its SHA-256 is another"));
    }
    let mut parts = Vec::new();
    while !left.is_empty() {
        let (part, rest) = first(left).ok_or_else(|| {
            error!(Corrupt, "{name}: part {} of a kernel's image is longer than what there is", parts.len())
        })?;
        parts
            .try_reserve(1)
            .map_err(|_| -> Error { error!(OutOfMemory, "a list of {} parts could not be had", parts.len() + 1) })?;
        parts.push(part);
        left = rest;
    }
    Ok(parts)
}

/// The first part, and what follows it.
fn first(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (size, rest) = bytes.split_first_chunk::<8>()?;
    rest.split_at_checked(usize::try_from(u64::from_le_bytes(*size)).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Status;

    /// An image of such bytes after its header, with the right size and digest.
    fn sealed(body: &[u8]) -> Vec<u8> {
        let size = (24 + body.len() + 32) as u64;
        let mut bytes = [b"gckernel", &1u64.to_le_bytes()[..], &size.to_le_bytes(), body].concat();
        bytes.extend_from_slice(&Sha256::digest(&bytes));
        bytes
    }

    fn refusal(bytes: &[u8]) -> Error {
        unpack("mine", bytes).unwrap_err()
    }

    #[test]
    fn parts_come_back_as_they_were() {
        let parts: [&[u8]; 4] = [b"one", b"", &[7; 1000], b"\0"];
        let bytes = pack(&parts).unwrap();
        assert_eq!(bytes.len(), 24 + 4 * 8 + 3 + 1000 + 1 + 32);
        assert_eq!(unpack("image", &bytes).unwrap(), parts);
        assert!(unpack("image", &pack(&[]).unwrap()).unwrap().is_empty());
    }

    #[test]
    fn the_form_is_what_the_first_comment_says() {
        let body = [&3u64.to_le_bytes()[..], b"one", &0u64.to_le_bytes()].concat();
        assert_eq!(pack(&[b"one", b""]).unwrap(), sealed(&body));
        // The digest of "abc", from FIPS 180-4.
        let expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let digest: String = Sha256::digest(b"abc").iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(digest, expected);
    }

    #[test]
    fn every_changed_or_missing_byte_is_found() {
        let bytes = pack(&[b"one", b"three"]).unwrap();
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x40;
            assert_eq!(refusal(&damaged).status, Status::Corrupt, "byte {at}");
            assert_eq!(refusal(&bytes[..at]).status, Status::Corrupt, "{at} bytes");
        }
        assert_eq!(refusal(&[&bytes[..], b"\0"].concat()).status, Status::Corrupt);
    }

    #[test]
    fn lengths_are_not_believed_though_the_digest_is_right() {
        for body in [&[1u8][..], &1u64.to_le_bytes(), &u64::MAX.to_le_bytes(), &(u64::MAX - 7).to_le_bytes(), &[0; 7]] {
            let words = "mine: part 0 of a kernel's image is longer than what there is";
            assert_eq!(refusal(&sealed(body)).message, words, "{body:?}");
        }
    }

    #[test]
    fn a_refusal_says_what_is_wrong() {
        let bytes = pack(&[]).unwrap();
        let mut newer = bytes.clone();
        newer[8] = 2;
        let mut damaged = bytes.clone();
        damaged[50] ^= 1;
        for (bytes, words) in [
            (&b"nothing"[..], "mine: 7 bytes, which is not all of a kernel's image"),
            (&[9; 100], "mine: not the image of a kernel"),
            (&newer, "mine: an image of version 2; this library reads version 1"),
            (&[&bytes[..], &[0; 5]].concat(), "mine: 61 bytes of an image of 56 bytes"),
            (&damaged, "mine: the image of a kernel, damaged: its SHA-256 is another"),
        ] {
            assert_eq!(refusal(bytes).message, words);
        }
    }
}
