//! Variants of a kernel: the code compiled for it so far.

use std::{iter, sync::OnceLock};

use crate::{
    ffi::error::{Result, error},
    jit::{self, cuda::Image, entries::Entries, layout::Specialization},
};

/// Compiled code of some entries of a specialization.
pub struct Variant {
    pub capability: i32,
    pub specialization: Specialization,
    pub entries: Entries,
    /// Code of the entries, or the error of their compilation.
    pub code: jit::Compiled,
    pub image: OnceLock<Image>,
    /// Variants that were added later.
    pub next: Variants,
}

impl Variant {
    pub fn code(&self) -> Result<&[u8]> {
        self.code.as_deref().map_err(|why| error!(Compile, "{why}"))
    }
}

/// Append-only list of variants. A variant does not move and lives as long as the kernel, so that a launch needs no
/// lock.
#[derive(Default)]
pub struct Variants(OnceLock<Vec<Variant>>); // one element: unlike a Box, a Vec can report a failed allocation

impl Variants {
    fn first(&self) -> Option<&Variant> {
        self.0.get().and_then(|one| one.first())
    }

    pub fn iter(&self) -> impl Iterator<Item = &Variant> {
        iter::successors(self.first(), |variant| variant.next.first())
    }

    /// Returns all variants that contain these entries.
    pub fn serving<'a>(
        &'a self, capability: i32, specialization: &Specialization, entries: Entries,
    ) -> impl Iterator<Item = &'a Variant> {
        self.iter().filter(move |variant| {
            variant.capability == capability
                && variant.entries.include(entries)
                && variant.specialization == *specialization
        })
    }

    /// Returns a variant that contains these entries, or a failed one of exactly these: fewer may still compile.
    pub fn find<'a>(
        &'a self, capability: i32, specialization: &Specialization, entries: Entries,
    ) -> Option<&'a Variant> {
        let serving = || self.serving(capability, specialization, entries);
        let good = serving().find(|variant| variant.code.is_ok());
        good.or_else(|| serving().find(|variant| variant.entries == entries))
    }

    /// Appends a variant; returns None if there is no memory.
    pub fn add(&self, variant: Variant) -> Option<&Variant> {
        let mut one = Vec::new();
        one.try_reserve_exact(1).ok()?;
        one.push(variant);
        let mut end = self;
        while let Err(back) = end.0.set(one) {
            one = back;
            end = &end.first()?.next;
        }
        end.first()
    }
}

impl Drop for Variants {
    fn drop(&mut self) {
        // The loop avoids recursive drops, since calls have little stack.
        let mut next = self.0.take();
        while let Some(mut one) = next {
            next = one.first_mut().and_then(|variant| variant.next.0.take());
        }
    }
}

#[cfg(test)]
mod tests {
    use arrayvec::ArrayVec;

    use super::*;
    use crate::jit::entries::Entry;

    #[test]
    fn entries_that_fail_together_are_compiled_by_themselves() {
        let specialization = Specialization { bindings: ArrayVec::new(), many_loops: false };
        let some = |entries: &[Entry]| entries.iter().fold(Entries::default(), |some, &entry| some.with(entry));
        let variant = |entries, code| Variant {
            capability: 90,
            specialization: specialization.clone(),
            entries,
            code,
            image: OnceLock::new(),
            next: Variants::default(),
        };
        let [all, one, other] =
            [&[Entry::Vectors, Entry::Elements][..], &[Entry::Vectors], &[Entry::Elements]].map(some);
        let variants = Variants::default();
        variants.add(variant(all, Err(String::from("too much")))).unwrap();
        assert!(variants.find(90, &specialization, one).is_none());
        assert!(variants.find(90, &specialization, all).unwrap().code().is_err());
        variants.add(variant(one, Ok(vec![1]))).unwrap();
        assert_eq!(variants.find(90, &specialization, one).unwrap().code().unwrap(), [1]);
        assert!(variants.find(90, &specialization, other).is_none());
        assert!(variants.find(80, &specialization, one).is_none());
    }
}
