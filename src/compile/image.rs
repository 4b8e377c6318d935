//! The form in which kernels are kept: parts, each with its length, of a known kind, and a digest of all.
//!
//! ```text
//! "gckernel"  version  kind  bytes in all | bytes  part | bytes  part | ... | SHA-256 of all before
//!  8           4        4     8             8             8                   32
//! ```
//!
//! Numbers are little-endian. The digest finds damage, not malice: whoever may write an image may also compute it.

use sha2::{Digest, Sha256};

use crate::error::{Error, Result, error};

const MAGIC: &[u8; 8] = b"gckernel";

/// Changes whenever an image is read in another way, and whenever its kernels mean something else or take another argument:
/// that is not in it.
const VERSION: u32 = 5;

const HEADER: usize = 24;
const DIGEST: usize = 32;

/// What an image is of.
pub type Kind = [u8; 4];

/// An image that is being made.
pub struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    pub fn new(kind: Kind) -> Result<Self> {
        let mut bytes = super::room(HEADER)?;
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&kind);
        bytes.extend_from_slice(&[0; 8]); // the size, when it is known
        Ok(Self { bytes })
    }

    pub fn add(&mut self, part: &[u8]) -> Result<()> {
        self.reserve(8 + part.len())?;
        self.bytes.extend_from_slice(&(part.len() as u64).to_le_bytes());
        self.bytes.extend_from_slice(part);
        Ok(())
    }

    pub fn finish(mut self) -> Result<Vec<u8>> {
        self.reserve(DIGEST)?;
        let size = (self.bytes.len() + DIGEST) as u64;
        self.bytes[HEADER - 8..HEADER].copy_from_slice(&size.to_le_bytes());
        let digest = Sha256::digest(&self.bytes);
        self.bytes.extend_from_slice(&digest);
        Ok(self.bytes)
    }

    fn reserve(&mut self, bytes: usize) -> Result<()> {
        let reserved = self.bytes.try_reserve(bytes);
        reserved.map_err(|_| error!(OutOfMemory, "cannot allocate {bytes} bytes for the image of a kernel"))
    }
}

/// An image whose digest is right, from which parts are taken one after the other.
pub struct Reader<'a> {
    /// What the caller calls it.
    name: &'a str,
    left: &'a [u8],
}

impl<'a> Reader<'a> {
    pub fn new(name: &'a str, bytes: &'a [u8], kind: Kind) -> Result<Self> {
        let given = bytes.len();
        let short = || error!(Corrupt, "{name}: {given} bytes, which is not all of a kernel's image");
        let (body, digest) = bytes.split_last_chunk::<DIGEST>().ok_or_else(short)?;
        let (header, left) = body.split_first_chunk::<HEADER>().ok_or_else(short)?;
        let number = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        if !header.starts_with(MAGIC) {
            return Err(error!(Corrupt, "{name}: not the image of a kernel"));
        }
        if number(8) != VERSION {
            return Err(error!(
                Corrupt,
                "{name}: an image of version {}; this library reads version {VERSION}",
                number(8)
            ));
        }
        if header[12..16] != kind {
            return Err(error!(Corrupt, "{name}: an image of another kind"));
        }
        let size = u64::from(number(16)) | u64::from(number(20)) << 32;
        if size != given as u64 {
            return Err(error!(Corrupt, "{name}: {given} bytes of an image of {size} bytes"));
        }
        if Sha256::digest(body)[..] != digest[..] {
            return Err(error!(Corrupt, "{name}: the image of a kernel, damaged: its SHA-256 is another"));
        }
        Ok(Self { name, left })
    }

    /// The next part.
    pub fn take(&mut self) -> Result<&'a [u8]> {
        let part = self.left.split_first_chunk::<8>().and_then(|(size, rest)| {
            let size = usize::try_from(u64::from_le_bytes(*size)).ok()?;
            rest.split_at_checked(size)
        });
        let (part, left) = part.ok_or_else(|| self.malformed())?;
        self.left = left;
        Ok(part)
    }

    /// No part must be left.
    pub fn done(self) -> Result<()> {
        if self.left.is_empty() { Ok(()) } else { Err(self.malformed()) }
    }

    fn malformed(&self) -> Error {
        error!(Corrupt, "{}: the image of a kernel whose parts are not what its kind has", self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Status;

    const KIND: Kind = *b"TEST";

    fn image(parts: &[&[u8]]) -> Vec<u8> {
        let mut writer = Writer::new(KIND).unwrap();
        parts.iter().for_each(|part| writer.add(part).unwrap());
        writer.finish().unwrap()
    }

    /// An image of such bytes after its header, with the right size and digest.
    fn sealed(body: &[u8]) -> Vec<u8> {
        let size = (24 + body.len() + 32) as u64;
        let mut bytes = [&b"gckernel"[..], &VERSION.to_le_bytes(), b"TEST", &size.to_le_bytes(), body].concat();
        bytes.extend_from_slice(&Sha256::digest(&bytes));
        bytes
    }

    #[test]
    fn parts_come_back_as_they_were() {
        let parts: [&[u8]; 4] = [b"one", b"", &[7; 1000], b"\0"];
        let bytes = image(&parts);
        assert_eq!(bytes.len(), 24 + 4 * 8 + 3 + 1000 + 1 + 32);
        let mut reader = Reader::new("image", &bytes, KIND).unwrap();
        for part in parts {
            assert_eq!(reader.take().unwrap(), part);
        }
        reader.done().unwrap();
    }

    #[test]
    fn the_form_is_what_the_first_comment_says() {
        // That of "abc", from FIPS 180-4.
        let expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let digest: String = Sha256::digest(b"abc").iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(digest, expected);
        let body = [&3u64.to_le_bytes()[..], b"one", &0u64.to_le_bytes()].concat();
        assert_eq!(image(&[b"one", b""]), sealed(&body));
    }

    #[test]
    fn every_changed_or_missing_byte_is_found() {
        let bytes = image(&[b"one", b"three"]);
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x40;
            assert_eq!(Reader::new("image", &damaged, KIND).err().unwrap().status, Status::Corrupt, "byte {at}");
            assert_eq!(Reader::new("image", &bytes[..at], KIND).err().unwrap().status, Status::Corrupt, "{at} bytes");
        }
        let longer = [&bytes[..], b"\0"].concat();
        assert_eq!(Reader::new("image", &longer, KIND).err().unwrap().status, Status::Corrupt);
    }

    #[test]
    fn lengths_are_not_believed_though_the_digest_is_right() {
        let size = |size: u64| size.to_le_bytes();
        for body in [&[1u8][..], &size(1), &size(u64::MAX), &size(u64::MAX - 7), &[0; 7]] {
            let bytes = sealed(body);
            let mut reader = Reader::new("image", &bytes, KIND).unwrap();
            assert_eq!(reader.take().unwrap_err().status, Status::Corrupt, "{body:?}");
        }
        let bytes = image(&[b"one", b"two"]);
        let mut reader = Reader::new("image", &bytes, KIND).unwrap();
        reader.take().unwrap();
        assert_eq!(reader.done().unwrap_err().status, Status::Corrupt);
    }

    #[test]
    fn a_refusal_says_what_was_wrong() {
        let bytes = image(&[]);
        let mut newer = bytes.clone();
        newer[8] = 6;
        for (bytes, kind, words) in [
            (&b"nothing"[..], KIND, "mine: 7 bytes, which is not all of a kernel's image"),
            (&[9; 100], KIND, "mine: not the image of a kernel"),
            (&newer, KIND, "mine: an image of version 6; this library reads version 5"),
            (&bytes, *b"ELSE", "mine: an image of another kind"),
            (&[&bytes[..], &[0; 5]].concat(), KIND, "mine: 61 bytes of an image of 56 bytes"),
        ] {
            assert_eq!(Reader::new("mine", bytes, kind).err().unwrap().message, words);
        }
    }
}
