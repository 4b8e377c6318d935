//! Kernels outside of the process: as bytes, with all that was compiled.
//!
//! The parts of such an image: flags; the texts; the number of options, and these; the number of variants, and of each its
//! key and its code. A key: the capability, 4 bytes; the bits of its entries and, highest, of many loops, 4; and of each
//! parameter its dtype, how it is bound, and its dimensions.

use arrayvec::ArrayVec;

use crate::{
    backend::{Queue, cpu},
    compile::{
        self,
        definition::{Definition, Texts},
        entries::Entries,
        image::{self, Kind},
        layout::{Binding, BindingKind, Specialization},
        owned,
        parameters::MOST,
        types,
    },
    error::{Error, Result, Status, error},
    ops::tensors,
    tensor::{Device, Dtype, Outputs, Shape},
};

use super::{Kernel, out_of_memory};

/// What an image is of.
const SAVED: Kind = *b"kern";

/// Among the bits of entries: the specialization takes many loops.
const MANY_LOOPS: u32 = 1 << 31;

impl Kernel {
    /// The definition, and all that was compiled, as bytes.
    pub fn save(&self) -> Result<Outputs> {
        let mut saved = image::Writer::new(SAVED)?;
        let definition = &self.definition;
        saved.add(&[u8::from(definition.is_reduction), u8::from(definition.contracts), u8::from(self.use_disk)])?;
        for text in &definition.texts {
            saved.add(text.as_deref().unwrap_or_default().as_bytes())?;
        }
        saved.add(&(definition.options.len() as u64).to_le_bytes())?;
        for option in &definition.options {
            saved.add(option.as_bytes())?;
        }
        let compiled =
            || self.variants.iter().filter_map(|variant| variant.code.as_ref().ok().map(|code| (variant, code)));
        // Others may compile more meanwhile.
        let count = compiled().count();
        saved.add(&(count as u64).to_le_bytes())?;
        for (variant, code) in compiled().take(count) {
            let mut key: ArrayVec<u8, { 8 + 3 * MOST }> = ArrayVec::new();
            key.extend(variant.capability.to_le_bytes());
            let many_loops = if variant.specialization.many_loops { MANY_LOOPS } else { 0 };
            key.extend((variant.entries.to_bits() | many_loops).to_le_bytes());
            for binding in &variant.specialization.bindings {
                let (kind, ndim) = match binding.kind {
                    BindingKind::Tensor => (0, 0),
                    BindingKind::Scalar => (1, 0),
                    BindingKind::Raw { ndim, contiguous } => (2 + u8::from(contiguous), ndim),
                };
                key.extend([types::number(binding.dtype), kind, ndim]);
            }
            saved.add(&key)?;
            saved.add(code)?;
        }
        let bytes = saved.finish()?;
        let size = bytes.len() as i64;
        let tensor = tensors::results(&mut Queue::Cpu, Device::Cpu, Dtype::U8, Shape::of(&[size]), 1)?;
        cpu::memory::write(&tensor.view(), &bytes);
        Ok(tensor.finished())
    }

    /// The kernel that was saved.
    pub fn load(bytes: &[u8]) -> Result<Self> {
        let mut saved = image::Reader::new("data", bytes, SAVED)?;
        let &[is_reduction, contracts, use_disk] = saved.take()? else { return Err(not_a_kernel()) };
        let mut texts = Texts::default();
        for place in &mut texts {
            *place = Some(text(saved.take()?)?);
        }
        let mut options = Vec::new();
        for _ in 0..number(saved.take()?)? {
            options.try_reserve(1).map_err(|_| error!(OutOfMemory, "data: cannot allocate a list of options"))?;
            options.push(text(saved.take()?)?);
        }
        let definition = Definition::new(is_reduction != 0, texts, options, contracts != 0);
        let definition = definition.map_err(|refusal| match refusal.status {
            Status::OutOfMemory => refusal,
            _ => error!(Corrupt, "data: {}", refusal.message),
        })?;
        let kernel = Self::new(definition, compile::Handle::NONE, use_disk != 0);
        let mut end = &kernel.variants;
        for _ in 0..number(saved.take()?)? {
            let (key, code) = (saved.take()?, saved.take()?);
            let (capability, specialization, entries) = kernel.key_of(key)?;
            let mut copy = Vec::new();
            copy.try_reserve_exact(code.len()).map_err(|_| out_of_memory(&kernel.definition))?;
            copy.extend_from_slice(code);
            end = &kernel.keep(end, capability, specialization, entries, Ok(copy))?.next;
        }
        saved.done()?;
        Ok(kernel)
    }

    /// What a variant was compiled for.
    fn key_of(&self, key: &[u8]) -> Result<(i32, Specialization, Entries)> {
        let (capability, rest) = key.split_first_chunk().ok_or_else(not_a_kernel)?;
        let (what, bindings) = rest.split_first_chunk().ok_or_else(not_a_kernel)?;
        let what = u32::from_le_bytes(*what);
        let entries = Entries::from_bits(what & !MANY_LOOPS, self.definition.is_reduction).ok_or_else(not_a_kernel)?;
        let many_loops = what & MANY_LOOPS != 0;
        let mut specialization = Specialization { bindings: ArrayVec::new(), many_loops };
        if bindings.len() != 3 * self.definition.parameters.len() {
            return Err(not_a_kernel());
        }
        for binding in bindings.chunks_exact(3) {
            let kind = match (binding[1], binding[2]) {
                (0, _) => BindingKind::Tensor,
                (1, _) => BindingKind::Scalar,
                (contiguous, ndim) => BindingKind::Raw { ndim, contiguous: contiguous == 3 },
            };
            let dtype = types::of_number(binding[0]).ok_or_else(not_a_kernel)?;
            specialization.bindings.push(Binding { dtype, kind });
        }
        Ok((i32::from_le_bytes(*capability), specialization, entries))
    }
}

fn not_a_kernel() -> Error {
    error!(Corrupt, "data: its parts are not those of a kernel")
}

fn number(part: &[u8]) -> Result<u64> {
    part.first_chunk()
        .filter(|bytes| bytes.len() == part.len())
        .map(|bytes| u64::from_le_bytes(*bytes))
        .ok_or_else(not_a_kernel)
}

fn text(part: &[u8]) -> Result<String> {
    owned(std::str::from_utf8(part).map_err(|_| not_a_kernel())?)
}
