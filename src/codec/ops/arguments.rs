//! Checks of the tensors of a codec's calls.

use crate::{
    codec::plan::{ALIGNMENT, CODEC_FIELD, HEADER, Kind},
    device::Queue,
    dlpack::{
        Address, Device, Dtype, View, check_apart,
        checks::{check_contiguous, check_dtype, check_elements},
    },
    ffi::{
        error::{Result, error},
        name::Name,
    },
};

use super::Codec;

impl Codec {
    pub fn check_device(&self, tensor: &View<'_>) -> Result<()> {
        if tensor.device() == self.device {
            return Ok(());
        }
        Err(error!(InvalidArgument, "{} is on {}, the codec on {}", tensor.name(), tensor.device(), self.device))
    }

    /// Checks one tensor for each segment, also with `check`, and stores their addresses in `places`.
    pub fn take_values<'v>(
        &self, values: impl ExactSizeIterator<Item = Result<View<'v>>>, known: &[Dtype], places: &mut Vec<Address>,
        mut check: impl FnMut(&View<'v>) -> Result<()>,
    ) -> Result<()> {
        let workers = &self.plan.workers;
        if values.len() != workers.len() {
            return Err(error!(
                InvalidArgument,
                "n_values: {} expected, one tensor for each segment, got {}",
                workers.len(),
                values.len()
            ));
        }
        places.clear();
        for (one, run) in values.zip(workers) {
            let one = one?;
            check_dtype(&one, known)?;
            check_elements(&one, run.elements)?;
            check_contiguous(&one)?;
            self.check_device(&one)?;
            check(&one)?;
            places.push(Address(one.data()));
        }
        Ok(())
    }

    /// Stores the address of each segment's part of a shard in `places`. The parts follow one another.
    pub fn take_shard(&self, shard: &View<'_>, places: &mut Vec<Address>) {
        let (mut parts, mut at) = (self.plan.servers.iter().peekable(), Address(shard.data()));
        places.clear();
        for segment in 0..self.plan.workers.len() {
            places.push(at);
            if let Some(part) = parts.next_if(|part| part.segment == segment) {
                at = Address(at.at(part.elements as usize * Dtype::F32.size));
            }
        }
    }

    /// Checks that no two of the values that `take_values` has checked share a byte.
    pub fn check_apart(&self, places: &[Address], extents: &mut Vec<(usize, usize)>, dtype: Dtype) -> Result<()> {
        let extent = |index: usize| {
            let start = places[index].0.addr();
            start..start + self.plan.workers[index].elements as usize * dtype.size
        };
        extents.clear();
        extents.extend(
            (0..places.len()).filter(|&index| !extent(index).is_empty()).map(|index| (extent(index).start, index)),
        );
        if !extents.is_sorted() {
            extents.sort_unstable();
        }
        // In this order it is enough to compare neighbours: if any two extents intersect, two neighbours do.
        for pair in extents.windows(2) {
            let (one, other) = (pair[0].1.min(pair[1].1), pair[0].1.max(pair[1].1));
            if extent(pair[0].1).end > pair[1].0 {
                let names = [other, one].map(name_of_values);
                check_apart(&names[0], &extent(other), &names[1], &extent(one))?;
            }
        }
        Ok(())
    }

    pub fn check_scalar(&self, scalar: &View<'_>, known: &[Dtype]) -> Result<()> {
        check_dtype(scalar, known)?;
        check_elements(scalar, 1)?;
        self.check_device(scalar)
    }

    /// Checks an output that lies on the device or in pinned memory.
    pub fn check_result(&self, dst: &View<'_>, dtype: Dtype, elements: i64) -> Result<()> {
        check_dtype(dst, &[dtype])?;
        check_elements(dst, elements)?;
        check_contiguous(dst)?;
        if dst.is_pinned() { Ok(()) } else { self.check_device(dst) }
    }

    /// Checks a payload, a chunk or a state of `expected` bytes.
    pub fn check_bytes(&self, bytes: &View<'_>, expected: i64) -> Result<()> {
        check_elements(bytes, expected)?;
        self.check_memory(bytes)
    }

    /// Checks a payload. On the CPU, which can read headers, the refusal of another codec's payload names that codec.
    pub fn check_payload(&self, payload: &View<'_>) -> Result<()> {
        let (expected, got) = (self.plan.payload_bytes(), payload.elements());
        if got != expected && got >= HEADER as i64 && self.device == Device::Cpu && self.check_memory(payload).is_ok() {
            let (own, mut header) = (self.plan.header(0), [0; HEADER]);
            Queue::Cpu.read_bytes(&payload.part(0, &[HEADER as i64]), &mut header)?;
            let is_payload = header[..CODEC_FIELD.start] == own[..CODEC_FIELD.start];
            let (kind, other) = (self.plan.rules.kind, Kind::of_header(&header).filter(|_| is_payload));
            if let Some(other) = other.filter(|&other| other != kind) {
                return Err(error!(
                    ShapeMismatch,
                    "{}: {expected} bytes of {} expected, got {got} bytes of {}",
                    payload.name(),
                    kind.name(),
                    other.name()
                ));
            }
        }
        self.check_bytes(payload, expected)
    }

    pub fn check_memory(&self, bytes: &View<'_>) -> Result<()> {
        check_dtype(bytes, &[Dtype::U8])?;
        check_contiguous(bytes)?;
        check_aligned(bytes)?;
        self.check_device(bytes)
    }

    pub fn check_errors(&self, worker: Option<&View<'_>>, server: Option<&View<'_>>) -> Result<()> {
        let plan = &self.plan;
        if server.is_some() && plan.server.is_none() {
            return Err(error!(InvalidArgument, "server: this codec was made to reduce no chunk"));
        }
        for (errors, elements) in [(worker, plan.row_elements), (server, plan.server_elements())] {
            if let Some(errors) = errors {
                self.check_floats(errors, elements)?;
            }
        }
        Ok(())
    }

    pub fn check_floats(&self, floats: &View<'_>, elements: i64) -> Result<()> {
        check_dtype(floats, &[Dtype::F32])?;
        check_elements(floats, elements)?;
        check_contiguous(floats)?;
        self.check_device(floats)
    }
}

/// Returns the name of a tensor of values.
fn name_of_values(index: usize) -> Name {
    Name::of_item("values", index)
}

pub fn check_aligned(tensor: &View<'_>) -> Result<()> {
    let address = tensor.data().addr();
    if (address as u64).is_multiple_of(ALIGNMENT as u64) {
        return Ok(());
    }
    Err(error!(InvalidArgument, "{}: address {address:#x} is not aligned to {ALIGNMENT}", tensor.name()))
}
